"""A model folder's JSON files, and typed access to their fields with errors that name file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.contracts.errors import SettingsError


class Fields:
    """The fields of one JSON object. `prefix` is where in the file it stands, such as `rope_parameters.`"""

    def __init__(self, raw: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.raw = raw
        self.path = path
        self._prefix = prefix

    def within(self, field: str, value: dict[str, Any]) -> Fields:
        """The fields of an object that stands in this one."""
        return Fields(value, self.path, f"{self._prefix}{field}.")

    def error(self, field: str, what: str) -> SettingsError:
        return SettingsError(f"{self.path}: {self._prefix}{field}: {what}", param=f"{self._prefix}{field}")

    def positive(self, field: str, default: int | None = None) -> int:
        """A whole number from 1; null is as good as missing. Raises SettingsError without a value or default."""
        value = self.raw.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"{value!r} is not a positive whole number")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A number above 0; null is as good as missing. Raises SettingsError without a value or default."""
        value = self.raw.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(field, f"{value!r} is not a positive number")
        return float(value)

    def flag(self, field: str) -> bool:
        """true or false; false when missing."""
        value = self.raw.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, f"{value!r} is not true or false")
        return bool(value)


def read_fields(path: Path) -> Fields:
    """The object in a JSON file. Raises SettingsError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"cannot read {path}: {exc.strerror}", param=path.name) from exc
    except ValueError as exc:
        raise SettingsError(f"{path} is not JSON: {exc}", param=path.name) from exc
    if not isinstance(value, dict):
        raise SettingsError(f"{path} does not hold an object", param=path.name)
    return Fields(value, path)
