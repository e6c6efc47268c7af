"""`./baton trace`: lists recent requests of the running stack; `./baton trace ID` prints one as a waterfall."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from services.cli.connection import add_connection_options, connection
from services.cli.waterfall import WIDTH, list_table, waterfall
from shared.contracts.errors import BatonError, Unavailable
from shared.contracts.parts import SpanRecord
from shared.telemetry.trace_buffer import TraceSummary


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    width = max(60, min(shutil.get_terminal_size((WIDTH, 24)).columns, 160))
    try:
        if options.id:
            spans = msgspec.convert(_fetch(options, f"/baton/traces/{options.id}")["spans"], list[SpanRecord])
            print(waterfall(spans, width))
        else:
            found = msgspec.convert(_fetch(options, f"/baton/traces?limit={options.limit}")["data"], list[TraceSummary])
            print(list_table(found, time.time(), width))
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
    if response.status_code != 200:
        raise target.refusal(response)
    return response.json()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton trace", description="List recent requests, or print one as a waterfall."
    )
    parser.add_argument("id", nargs="?", help="request id, answer id or trace id; the first characters are enough")
    parser.add_argument("--limit", type=int, default=20, help="how many requests to list (default 20)")
    add_connection_options(parser)
    return parser
