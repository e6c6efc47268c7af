"""The gguf package's reader, for files of strangers: what a file says it holds must be there, and of bearable size.

The package reads on behind a file's end, where it finds empty arrays, and as often as a count in the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from shared.contracts.errors import SettingsError
from shared.model.convert_gguf import read_fields

MOST_READS = 8_000_000
"""Numbers and texts in a file's head: the largest vocabularies have two million of them."""
MOST_TOLD = 200
"""Characters of a file's own words in a message."""
_FAULTS = (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError)


class BoundedReader(gguf.GGUFReader):
    """Raises ValueError where the file ends too soon or says too much, beside what its base raises."""

    _reads = 0

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        self._reads += 1
        if self._reads > MOST_READS:
            raise ValueError(f"its head has more than {MOST_READS} entries")
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"it ends before what it says stands at byte {int(offset)}")
        return super()._get(offset, dtype, count, override_order)


def open_gguf(path: Path) -> tuple[gguf.GGUFReader, Mapping[str, Any]]:
    """A file's tensors, mapped, and its fields as plain values.

    Raises:
        SettingsError: it is not such a file, or not all of one; names the file.
    """
    try:
        reader = BoundedReader(path)
        fields = read_fields(reader)
    except _FAULTS as exc:
        raise SettingsError(f"{path} is not a GGUF file that can be read: {plain(exc)}", param=path.name) from exc
    if reader.byte_order != "I":
        told = f"{path}: its numbers are in the byte order of another machine, which is not supported"
        raise SettingsError(told, param=path.name)
    return reader, fields


def plain(told: object) -> str:
    """A file's own words for a message: on one line, and no longer than somebody reads."""
    line = "".join(c if c.isprintable() else "?" for c in str(told))
    return line if len(line) <= MOST_TOLD else f"{line[:MOST_TOLD]}..."
