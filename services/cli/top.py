"""`./baton top`: requests, queues and workers of the running stack, redrawn while one looks."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, TextIO

import httpx
import msgspec

from services.cli.connection import Connection, add_connection_options, connection
from services.cli.top_view import Snapshot, frame
from services.cli.waterfall import WIDTH
from shared.contracts.errors import BatonError, Unavailable
from shared.telemetry.trace_buffer import TraceSummary

TIMEOUT_S = 5.0
MOST_REQUESTS = 200
SHORTEST_S = 0.2
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code: 0 also after Ctrl-C, 1 when the key is refused or, with --once, on any error."""
    options = _parser().parse_args(argv)
    try:
        target = connection(options, os.environ, admin=True)
        with httpx.Client(base_url=target.url, headers=target.headers(), timeout=TIMEOUT_S) as client:
            return Top(client, target, options, sys.stdout).run()
    except BatonError as exc:
        print(f"baton top: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


class Top:
    """One run. On a terminal the screen is redrawn in place; elsewhere frames, or JSON lines, follow each other."""

    def __init__(self, client: httpx.Client, target: Connection, options: argparse.Namespace, out: TextIO) -> None:
        self._client = client
        self._target = target
        self._options = options
        self._out = out
        self._redraws = out.isatty() and not options.once and not options.json
        self._shown: Snapshot | None = None
        self._fault = ""

    def run(self) -> int:
        """Look and draw until told to stop. Raises what a refused key or, with --once, a silent gateway raises."""
        if self._options.once:
            self._look()
            self._draw()
            return 1 if self._fault else 0
        with _Screen(self._out, self._redraws):
            while True:
                self._look()
                self._draw()
                self._pause()

    def _look(self) -> None:
        try:
            cluster = self._get("/baton/cluster")
            requests = self._get(f"/baton/traces?limit={max(1, min(MOST_REQUESTS, _size().lines))}")
        except Unavailable as exc:
            if self._options.once:
                raise
            self._fault = exc.message
            return
        self._fault = ""
        self._shown = Snapshot(time.time(), cluster, msgspec.convert(requests["data"], list[TraceSummary]))

    def _get(self, path: str) -> Any:
        try:
            response = self._client.get(path)
            if response.status_code == 200:
                return response.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise Unavailable(f"no gateway of Baton answers at {self._target.url}") from exc
        error = self._target.refusal(response)
        raise Unavailable(error.message) if response.status_code >= 500 else error

    def _draw(self) -> None:
        if self._options.json:
            self._write(self._json() + "\n")
            return
        size = _size()
        lines = frame(self._target.url, self._shown, self._fault, (size.columns, size.lines), time.time())
        if self._redraws:
            self._write(HOME + f"{REST_OF_LINE}\n".join(lines) + REST_OF_LINE + REST_OF_SCREEN)
        else:
            self._write("\n".join(lines) + ("\n" if self._options.once else "\n\n"))

    def _json(self) -> str:
        if self._fault or self._shown is None:
            return json.dumps({"time_s": time.time(), "error": self._fault})
        requests = [msgspec.to_builtins(summary) for summary in self._shown.requests]
        return json.dumps({"time_s": self._shown.taken_s, "cluster": self._shown.cluster, "requests": requests})

    def _pause(self) -> None:
        """Wait for the next turn; a resized terminal is drawn again at once, without asking again."""
        deadline = time.monotonic() + self._options.interval
        while (left := deadline - time.monotonic()) > 0:
            if signal.sigtimedwait([signal.SIGWINCH], left) is not None and self._redraws:
                self._draw()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class _Screen:
    """The terminal's other screen, without a cursor, given back however the command ends. SIGWINCH is waited for."""

    def __init__(self, out: TextIO, redraws: bool) -> None:
        self._out = out
        self._redraws = redraws

    def __enter__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
        signal.signal(signal.SIGTERM, _terminated)
        if self._redraws:
            self._out.write(ENTER)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._redraws:
            with suppress(OSError):
                self._out.write(LEAVE)
                self._out.flush()


def _terminated(number: int, at: FrameType | None) -> None:
    sys.exit(128 + number)


def _size() -> os.terminal_size:
    return shutil.get_terminal_size((WIDTH, 40))


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SHORTEST_S <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be {SHORTEST_S:g} to 3600 seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton top", description="Watch requests, queues and workers. Ctrl-C ends it."
    )
    parser.add_argument(
        "--interval", type=_interval, default=2.0, metavar="S", help="seconds between looks (default 2)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end; 1 when nothing answers")
    parser.add_argument("--json", action="store_true", help="one JSON line a look: time_s, cluster, requests or error")
    add_connection_options(parser)
    return parser
