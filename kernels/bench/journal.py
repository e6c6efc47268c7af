"""Results as they come: a file of JSON lines that only grows, so that a run that is ended loses one line at most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """One file. A line that was cut short is passed over, and the next one begins behind it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first; none where there is no file."""
        lines = self.file.read_bytes().splitlines() if self.file.exists() else []
        return [entry for entry in map(_parsed, lines) if entry is not None]

    def append(self, **entry: Any) -> None:
        """Write a line, on the disk when this returns. Raises OSError."""
        whole = not self.file.exists() or self.file.read_bytes()[-1:] in (b"", b"\n")
        with self.file.open("ab") as out:
            out.write(b"" if whole else b"\n")
            out.write(json.dumps(entry).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
