# One image for every service; compose.yaml says which module a container runs.

# The native kernels of every level of the architecture: compiled here, so that what runs holds no compiler.
FROM python:3.11-slim AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    || echo "no gcc to be had: the wheel of zig will compile"
WORKDIR /opt/baton
COPY kernels kernels
RUN python3 -m kernels.native.ship /opt/native

FROM python:3.11-slim

# cpu, or gpu for PyTorch's CUDA build and the compiler that Triton's launchers need.
ARG EXTRA=cpu
RUN if [ "$EXTRA" = gpu ]; then \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
WORKDIR /opt/baton

# The environment is made by the code `./baton` uses, before the rest is copied: it changes only with the pins.
COPY requirements requirements
COPY services/__init__.py services/
COPY services/cli/__init__.py services/cli/environment.py services/cli/
RUN python3 -c "from services.cli import environment as e; e.ensure(e.wishes(e.ROOT, False, '${EXTRA}'), e.ROOT)"

COPY --from=kernels /opt/native /opt/native
COPY . .
RUN .venv/bin/python -m compileall -q kernels shared services

ENV PYTHONPATH=/opt/baton PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 BATON_NATIVE_LIBRARIES=/opt/native
USER 10001:10001
ENTRYPOINT ["/opt/baton/.venv/bin/python", "-P", "-m"]
