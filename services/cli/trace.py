"""`./baton trace`: lists recent requests of the running stack; `./baton trace ID` prints one as a waterfall."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from services.cli.connection import add_connection_options, connection
from services.cli.waterfall import WIDTH, list_table, waterfall
from shared.contracts.errors import BatonError, NotFound, Unavailable
from shared.contracts.parts import SpanRecord
from shared.telemetry.trace_buffer import TraceSummary

MOST = 200
"""As many traces a gateway lists."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    width = max(60, min(shutil.get_terminal_size((WIDTH, 24)).columns, 160))
    try:
        path = f"/baton/traces/{quote(options.id, safe='')}" if options.id else f"/baton/traces?limit={options.limit}"
        found = _fetch(options, path)
        if options.json:
            print(json.dumps(found if options.id else found["data"]))
        elif options.id:
            print(waterfall(msgspec.convert(found["spans"], list[SpanRecord]), width))
        else:
            print(list_table(msgspec.convert(found["data"], list[TraceSummary]), time.time(), width))
    except BatonError as exc:
        print(f"baton trace: {exc.message}", file=sys.stderr)
        return 1
    return 0


def _fetch(options: argparse.Namespace, path: str) -> Any:
    target = connection(options, os.environ, admin=True)  # a tenant's key does too, for its own traces
    try:
        response = httpx.get(target.url + path, headers=target.headers(), timeout=10.0)
    except httpx.HTTPError as exc:
        raise Unavailable(f"nothing answers at {target.url}; is it running? ./baton up starts it") from exc
    if response.status_code == 404 and options.id:
        raise NotFound(
            f"no trace {options.id!r}: either no recent id begins so, or several do; ./baton trace lists them"
        )
    if response.status_code != 200:
        raise target.refusal(response)
    return response.json()


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"must be 1 to {MOST}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton trace", description="List recent requests, or print one as a waterfall."
    )
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="request id, answer id or trace id; the first characters are enough"
    )
    parser.add_argument(
        "--limit", type=_limit, default=20, metavar="N", help=f"how many requests to list (default 20, at most {MOST})"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line: the list, or the trace with its spans")
    add_connection_options(parser)
    return parser
