"""`./baton logs`: the logs of all processes of a stack as one, in the order of time."""

from __future__ import annotations

import argparse
import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from services.cli.log_lines import LEVELS, LogLine, Wanted, as_json, parse_line, render
from services.cli.state import state_path
from services.cli.words import processes

POLL_S = 0.2
"""How often `-f` looks; lines found in one look are put in order among themselves."""
DEFAULT_LINES = 200
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when there are no logs, 2 for a name that has none. Ctrl-C ends `-f` quietly."""
    options = _parser().parse_args(argv)
    folder = state_path(os.environ) / "logs"
    files = log_files(folder, old=options.old)
    if not files:
        print(f"baton logs: no logs in {folder}: nothing was started on this state folder", file=sys.stderr)
        return 1
    chosen = choose(sorted(files), options.names)
    if unknown := [name for name in options.names if not processes(name, files)]:
        print(f"baton logs: no log of {', '.join(unknown)}; there are {', '.join(sorted(files))}", file=sys.stderr)
        return 2
    options.trace = options.trace.removeprefix("chatcmpl-").removeprefix("cmpl-")
    wanted = _filter(options, time.time())
    width = max(map(len, chosen))
    try:
        tails = [Tail(name, paths) for name, paths in files.items() if name in chosen]
        shown = _print(last([tail.read() for tail in tails], wanted, options.lines), width, options.json)
        if not shown and not options.follow:
            print("baton logs: no line of these logs matches", file=sys.stderr)
        while options.follow:
            time.sleep(POLL_S)
            _print(merged([tail.read() for tail in tails], wanted), width, options.json)
            tails += _new_files(folder, tails, options.names)
    except KeyboardInterrupt:
        return 0
    return 0


def log_files(folder: Path, *, old: bool) -> dict[str, list[Path]]:
    """Process name to its files, oldest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.old")) * old + sorted(folder.glob("*.log")):
        found.setdefault(path.stem, []).append(path)
    return found


def choose(known: Sequence[str], names: Sequence[str]) -> list[str]:
    """Processes that are meant: all, or those named, by themselves, by their service or by service and pool."""
    wanted = {process for name in names for process in processes(name, known)}
    return [process for process in known if not names or process in wanted]


class Tail:
    """Reads the files of one process to their end, again and again, across truncation and replacement of the last."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self._path = paths[-1]
        self._history = list(paths[:-1])
        self._file: BinaryIO | None = None
        self._rest = b""
        self._before: LogLine | None = None

    def read(self) -> Iterator[LogLine]:
        """Whole lines that came since the last call."""
        while self._history:
            with self._history.pop(0).open("rb") as file:
                yield from self._lines(file)
            yield from self._flush()
        if self._file is None:
            self._file = self._open()
        if self._file is None:
            return
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # cut, as a log that grew too long is
            self._file.seek(0)
            self._rest = b""
        yield from self._lines(self._file)
        if self._replaced():
            self._file.close()
            yield from self._flush()
            self._file = self._open()
            if self._file is not None:
                yield from self._lines(self._file)

    def _lines(self, file: BinaryIO) -> Iterator[LogLine]:
        for raw in file:
            if not raw.endswith(b"\n"):
                self._rest += raw  # its end is still being written
                return
            yield self._parsed(self._rest + raw)
            self._rest = b""

    def _flush(self) -> Iterator[LogLine]:
        """The last line of a file that was ended in the middle of it."""
        if self._rest:
            yield self._parsed(self._rest)
            self._rest = b""

    def _parsed(self, raw: bytes) -> LogLine:
        self._before = parse_line(self.name, raw.decode(errors="replace").rstrip("\r\n"), self._before)
        return self._before

    def _open(self) -> BinaryIO | None:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return None

    def _replaced(self) -> bool:
        """Another file has the name now: the stack was started anew."""
        assert self._file is not None
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(self._file.fileno())
        return (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino)


def merged(sources: Iterable[Iterable[LogLine]], wanted: Wanted) -> Iterator[LogLine]:
    """Lines of all sources by time; inside a source they keep their order, and a traceback stays in one piece."""
    rising = heapq.merge(*(_rising(source) for source in sources), key=lambda entry: entry[0])
    return (line for _, line in rising if wanted(line))


def last(sources: Iterable[Iterable[LogLine]], wanted: Wanted, lines: int) -> Iterable[LogLine]:
    """The newest `lines` of all sources; 0: all."""
    found = merged(sources, wanted)
    return found if lines == 0 else deque(found, maxlen=lines)


def _rising(lines: Iterable[LogLine]) -> Iterator[tuple[float, LogLine]]:
    """Lines with their times, made never to fall, so that a merge keeps their order."""
    latest = 0.0
    for line in lines:
        latest = max(latest, line.time_s)
        yield latest, line


def _new_files(folder: Path, tails: Sequence[Tail], names: Sequence[str]) -> list[Tail]:
    """Processes that have a log only now."""
    known = {tail.name for tail in tails}
    files = log_files(folder, old=False)
    return [Tail(name, files[name]) for name in choose(sorted(files), names) if name not in known]


def _filter(options: argparse.Namespace, now: float) -> Wanted:
    since = now - options.since if options.since is not None else 0.0

    def wanted(line: LogLine) -> bool:
        return line.time_s >= since and line.severe(options.level) and (not options.trace or line.about(options.trace))

    return wanted


def _print(lines: Iterable[LogLine], width: int, json: bool) -> int:
    """Print lines; how many they were."""
    count = 0
    for line in lines:
        print(as_json(line) if json else render(line, width))
        count += 1
    sys.stdout.flush()
    return count


def duration_s(text: str) -> float:
    """Seconds of `90s`, `5m`, `2h` or `1d`. Raises argparse.ArgumentTypeError."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 5m, 2h or 1d")
    return float(found[1]) * _SECONDS[found[2]]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton logs", description="Show the logs of a stack's processes as one, in the order of time."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="SERVICE",
        help="only these: a process such as decode-1, or all of a service, or of one pool (decode-large)",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines come, also across restarts")
    parser.add_argument(
        "-n",
        "--lines",
        type=_count,
        metavar="N",
        default=DEFAULT_LINES,
        help=f"the newest so many ({DEFAULT_LINES}); 0: all",
    )
    parser.add_argument("--level", choices=LEVELS[:4], default="debug", help="only lines at least so severe")
    parser.add_argument("--trace", default="", metavar="ID", help="only lines of a trace or request, by its id")
    parser.add_argument("--since", type=duration_s, metavar="5m", help="only lines of the last 30s, 5m, 2h, 1d")
    parser.add_argument("--old", action="store_true", help="also the run before, and what was cut from long logs")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser
