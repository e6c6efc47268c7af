"""Results as they come: a file of JSON lines that only grows, so that a run that is ended loses one line at most."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """One file. A line that was cut short is passed over, and the next one begins behind it.

    Args:
        of: fields that every line gets, and must have to be read: what was measured elsewhere is left alone.
    """

    def __init__(self, file: Path, of: Mapping[str, str] | None = None) -> None:
        self.file = file
        self._of = dict(of or {})

    def read(self) -> list[dict[str, Any]]:
        """All whole lines that have the journal's fields, oldest first; none where there is no file."""
        lines = self.file.read_bytes().splitlines() if self.file.exists() else []
        return [entry for entry in map(_parsed, lines) if entry is not None and self._of.items() <= entry.items()]

    def append(self, **entry: Any) -> None:
        """Write a line, on the disk when this returns. Raises OSError."""
        whole = not self.file.exists() or self.file.read_bytes()[-1:] in (b"", b"\n")
        with self.file.open("ab") as out:
            out.write(b"" if whole else b"\n")
            out.write(json.dumps(entry | self._of).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


def unwritable(*files: Path | None) -> str:
    """Make the folders of files that will be written when something was measured; why one cannot be, "" if all can."""
    for file in filter(None, files):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("ab").close()
        except OSError as exc:
            return f"{file}: {exc.strerror}"
    return ""


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
