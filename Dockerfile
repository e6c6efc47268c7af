# One image for every service; compose.yaml says which module a container runs.
FROM python:3.11-slim

# cpu, or gpu for PyTorch's CUDA build.
ARG EXTRA=cpu
WORKDIR /opt/baton

# The environment is made by the code `./baton` uses, before the rest is copied: it changes only with the pins.
COPY requirements requirements
COPY services/__init__.py services/
COPY services/cli/__init__.py services/cli/environment.py services/cli/
RUN python3 -c "from services.cli import environment as e; e.ensure(e.wishes(e.ROOT, False, '${EXTRA}'), e.ROOT)"

COPY . .
RUN .venv/bin/python -m compileall -q kernels shared services

ENV PYTHONPATH=/opt/baton PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["/opt/baton/.venv/bin/python", "-P", "-m"]
