"""Answers of gateways in processes of their own: each writes them to a file, and the process of the tests reads those.

A line is JSON, the answer's number in its file first. It is written before the client can see what it tells, so that a
gateway which is killed leaves what clients saw of it, and no client is held up by a reader.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.answer_tap import Answer, Taking

FOLDER_VARIABLE = "ANSWERS_FOLDER"
TAP = Path(__file__).with_name("gateway_tap")
"""A folder with the module that Python imports at its start."""


@functools.cache
def folder() -> Path:
    """Where gateways that tests start write their answers; gone when this process ends."""
    found = Path(tempfile.mkdtemp(prefix="answers-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


def environment() -> dict[str, str]:
    """What `./baton` is told so that its gateways write."""
    return {"BATON_PYTHONPATH": str(TAP), FOLDER_VARIABLE: str(folder())}


class AnswerWriter:
    """Writes the answers of this process to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(
            folder / f"{os.getpid()}-{time.monotonic_ns()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        self._numbers = itertools.count()

    def take(self, method: str, path: str) -> Taking:
        """As `answer_tap.Take`."""
        return _Written(self._file, next(self._numbers), method, path)


class _Written:
    def __init__(self, file: int, number: int, method: str, path: str) -> None:
        self._file, self._number = file, number
        self._write("begin", method, path)

    def head(self, status: int, kind: str, request_id: str) -> None:
        self._write("head", status, kind, request_id)

    def body(self, data: bytes, *, whole: bool) -> None:
        self._write("body", data.decode("latin-1"), whole)

    def over(self) -> None:
        self._write("over")

    def _write(self, *told: Any) -> None:
        os.write(self._file, json.dumps((self._number, *told)).encode() + b"\n")


class AnswerReader:
    """Reads what was written to a folder since it was asked last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._request_ids: set[str] = set()

    def answers(self) -> Iterator[Answer]:
        """Those that are whole or over, and those that a gateway left which is gone."""
        for path in sorted(self._folder.iterdir()):
            gone = not _lives(int(path.name.partition("-")[0]))  # before its last line is read
            file = self._files.setdefault(path, _File(path, self._request_ids))
            yield from file.answers()
            if gone:
                yield from file.left()
                del self._files[path]
                path.unlink()

    def request_ids(self) -> set[str]:
        """Of answers whose heads were read since this was asked last."""
        found = self._request_ids.copy()
        self._request_ids.clear()
        return found


class _File:
    def __init__(self, path: Path, request_ids: set[str]) -> None:
        self._path = path
        self._request_ids = request_ids
        self._at = 0
        self._open: dict[int, Answer] = {}

    def answers(self) -> Iterator[Answer]:
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                yield from self._told(*json.loads(line))

    def left(self) -> Iterator[Answer]:
        yield from self._open.values()

    def _told(self, number: int, what: str, *values: Any) -> Iterator[Answer]:
        if what == "begin":
            self._open[number] = Answer(*values)
        elif what == "head":
            self._open[number].head(*values)
            self._request_ids.add(values[2])
        elif what == "body":
            answer = self._open[number]
            answer.body(values[0].encode("latin-1"), whole=values[1])
            if answer.whole:  # its client may go on before it is over
                yield self._open.pop(number)
        elif answer := self._open.pop(number, None):
            yield answer


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
