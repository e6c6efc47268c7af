"""`./baton down`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from services.cli.state import StateFolder, state_path

BEYOND_S = 30.0
"""What we wait longer than the stop may take."""
POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Stop the stack of this state folder; 0 also when none runs."""
    argparse.ArgumentParser(prog="baton down", description="Stop the running stack.").parse_args(argv)
    path = state_path(os.environ)
    if not path.is_dir():
        print("no stack is running", file=sys.stderr)
        return 0
    state = StateFolder(path)
    pid = state.holder()
    if pid is None:
        # A supervisor that was killed took its children along, but could not tidy up.
        lock = state.lock()
        state.clear_run()
        lock.release()
        print("no stack is running", file=sys.stderr)
        return 0
    limit_s = BEYOND_S + state.stop_limit_s()
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if state.holder() is None:
            print("stopped", file=sys.stderr)
            return 0
        time.sleep(POLL_S)
    print(f"baton: process {pid} did not stop within {limit_s:g} s; end it with kill -9 {pid}", file=sys.stderr)
    return 1
