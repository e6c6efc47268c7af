#!/bin/sh
# Bring the compose stack up with Docker and try it: needs a Docker engine and Python 3.11, nothing else.
#   tests/compose/run.sh            build, check, take everything away
#   tests/compose/run.sh --observe  with Jaeger, Prometheus and Grafana as well
#   tests/compose/run.sh --keep     leave the stack running for a look
set -eu
cd "$(dirname "$0")/../.."
python3 -c "from services.cli import environment as e; e.ensure(e.wishes(e.ROOT, True, ''), e.ROOT)"
PYTHONPATH=$PWD exec .venv/bin/python -P -m tests.compose.check --build "$@"
