"""Reads the settings: flag > environment > file > default, and remembers where each value came from."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.contracts.errors import SettingsError
from shared.settings.models import parse_models, reason
from shared.settings.sections import SECTIONS, ModelEntry, Section, Settings
from shared.settings.toml_lines import key_lines

SCHEMA = 1
CONFIG_VARIABLE = "BATON_CONFIG"
CONFIG_NAME = "baton.toml"
DEFAULT = "default"
"""Origin of what nobody set."""
SHORT_NAMES = {
    "NATS_URL": "bus.nats_url",
    "REDIS_URL": "store.redis_url",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "telemetry.otlp_endpoint",
}
"""Variables other tools use too. `BATON_<SECTION>_<FIELD>` wins over them."""
MODELS_VARIABLE = "BATON_MODELS"
"""The `[[models]]` tables as JSON. Set, also to [], it stands for all a file says of models."""

ROOT = Path(__file__).resolve().parents[2]
_TOML_PLACE = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and where each `section.field` and `models.0.field` is from: `flag`, `environment NAME`, `FILE:LINE` or
    `default`."""

    settings: Settings
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    value: Any
    origin: str
    strict: bool  # a file has types of its own; flags and environment are text


@dataclass(frozen=True, slots=True)
class _Models:
    entries: tuple[ModelEntry, ...]
    origin: str
    origins: Mapping[str, str]  # by `models.0.name`
    given: bool  # any table at all, right or wrong


def load_settings(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, file: Path | None = None
) -> LoadedSettings:
    """The settings of this process.

    Args:
        flags: `section.field` to value; None values are left out.
        env: the environment; `BATON_<SECTION>_<FIELD>`, `BATON_MODELS`, `NATS_URL`, `REDIS_URL`.
        file: a `baton.toml`; None when there is none.

    Raises SettingsError with a line for each fault, which names the flag, variable, or file and line: unknown field,
    wrong type, value out of range, both `[model]` and `[[models]]`.
    """
    loaded, faults = read_settings(flags, env, file)
    if faults:
        raise SettingsError("\n".join(fault.message for fault in faults), param=faults[0].param)
    return loaded


def read_settings(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, file: Path | None = None
) -> tuple[LoadedSettings, list[SettingsError]]:
    """As `load_settings`, but tells everything that is wrong; settings at fault are left at their defaults.

    The faults of a file come in the order of its lines.
    """
    faults: list[SettingsError] = []
    lines: dict[str, int] = {}
    given, models = _from_file(file, lines, faults) if file is not None else ({}, None)
    if (told := _models_from_environment(env or {}, faults)) is not None:
        models = told
        given = {name: found for name, found in given.items() if not name.startswith("model.")}
    given |= _from_environment(env or {}, faults)
    for name, value in (flags or {}).items():
        if value is not None and _known(name, "flag", faults):
            given[name] = _Given(value, "flag", strict=False)
    tables = {section: _section(section, given, faults) for section in SECTIONS}
    if models is not None and models.given and (clash := _both_forms(given, models)) is not None:
        faults.append(clash)
    faults.sort(key=lambda fault: lines.get(fault.param, len(lines) + max(lines.values(), default=0)))
    return _loaded(tables, given, models), faults


def _section(section: str, given: Mapping[str, _Given], faults: list[SettingsError]) -> Section:
    table_type = SECTIONS[section]
    values: dict[str, Any] = {}
    for field in table_type.model_fields:
        if (found := given.get(f"{section}.{field}")) is not None:
            try:
                values[field] = _checked(table_type, section, field, found)
            except SettingsError as exc:
                faults.append(exc)
    return table_type(**values)


def _loaded(tables: Mapping[str, Section], given: Mapping[str, _Given], models: _Models | None) -> LoadedSettings:
    origins = {
        name: given[name].origin if name in given else DEFAULT
        for section, table_type in SECTIONS.items()
        for name in (f"{section}.{field}" for field in table_type.model_fields)
    }
    if models is None:
        return LoadedSettings(Settings(**tables), origins)
    return LoadedSettings(Settings(**tables, models=models.entries), {**origins, **models.origins})


def settings_file(env: Mapping[str, str], chosen: str | None = None) -> Path | None:
    """The file to read: `chosen`, else `$BATON_CONFIG`, else `baton.toml` beside the program if it exists.

    Raises SettingsError when a file that was asked for is missing.
    """
    if asked := chosen or env.get(CONFIG_VARIABLE):
        path = Path(asked)
        if not path.is_file():
            raise SettingsError(f"{asked}: no such settings file", param=asked)
        return path
    path = ROOT / CONFIG_NAME
    return path if path.is_file() else None


def as_environment(settings: Settings) -> dict[str, str]:
    """Variables that give a child process exactly these settings."""
    variables = {MODELS_VARIABLE: json.dumps([entry.model_dump() for entry in settings.models])}
    for section in SECTIONS:
        if section == "model" and settings.models:
            continue
        for field, value in getattr(settings, section).model_dump().items():
            variables[variable(section, field)] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


def variable(section: str, field: str) -> str:
    """The environment variable of one setting."""
    return f"BATON_{section}_{field}".upper()


def _from_file(
    path: Path, lines: dict[str, int], faults: list[SettingsError]
) -> tuple[dict[str, _Given], _Models | None]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        faults.append(_unreadable(path, exc))
        return {}, None
    lines |= key_lines(text)

    def place(name: str) -> str:
        return f"{path}:{lines.get(name, 1)}"

    schema = tables.pop("schema", None)
    if schema != SCHEMA:
        found = "is missing" if schema is None else f"is {schema!r}"
        message = f"{place('schema')}: schema {found}; this version reads schema = {SCHEMA}"
        faults.append(SettingsError(message, param="schema"))
    models = None
    if "models" in tables:
        models = _models(tables.pop("models"), place("models"), place, faults)
    given: dict[str, _Given] = {}
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            message = f"{place(section)}: unknown section [{section}]; {_choice(SECTIONS)}"
            faults.append(SettingsError(message, param=section))
            continue
        for field, value in table.items():
            name = f"{section}.{field}"
            if _known(name, place(name), faults):
                given[name] = _Given(value, place(name), strict=True)
    return given, models


def _unreadable(path: Path, exc: Exception) -> SettingsError:
    """Why a file cannot be read as TOML: `FILE:LINE: what is wrong` where a line is known."""
    if isinstance(exc, OSError):
        return SettingsError(f"{path}: {exc.strerror}", param=str(path))
    if isinstance(exc, UnicodeDecodeError):
        return SettingsError(f"{path}: not UTF-8 text (byte {exc.start})", param=str(path))
    if (found := _TOML_PLACE.fullmatch(str(exc))) is not None:
        return SettingsError(f"{path}:{found[2]}: not TOML: {found[1]}, at column {found[3]}", param=str(path))
    return SettingsError(f"{path}: not TOML: {exc}", param=str(path))


def _models_from_environment(env: Mapping[str, str], faults: list[SettingsError]) -> _Models | None:
    text, origin = env.get(MODELS_VARIABLE, ""), f"environment {MODELS_VARIABLE}"
    if not text.strip():
        return None
    try:
        tables = json.loads(text)
    except ValueError as exc:
        faults.append(SettingsError(f"{origin}: not JSON: {exc}", param=MODELS_VARIABLE))
        return None
    return _models(tables, origin, lambda name: f"{origin}: {name}", faults)


def _models(tables: Any, origin: str, place: Callable[[str], str], faults: list[SettingsError]) -> _Models:
    entries = parse_models(tables, place, faults)
    origins = {
        f"models.{number}.{field}": place(f"models.{number}.{field}") if field in table else DEFAULT
        for number, table in enumerate(tables if entries and len(entries) == len(tables) else ())
        for field in ModelEntry.model_fields
    }
    return _Models(entries, origin, origins, bool(tables))


def _both_forms(given: Mapping[str, _Given], models: _Models) -> SettingsError | None:
    for name, found in given.items():
        if name.startswith("model."):
            return SettingsError(
                f"{found.origin}: {name} and {models.origin}: [[models]] are both given; "
                "name one model in [model] or all of them in [[models]]",
                param=name,
            )
    return None


def _from_environment(env: Mapping[str, str], faults: list[SettingsError]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for short, name in SHORT_NAMES.items():
        if env.get(short):
            given[name] = _Given(env[short], f"environment {short}", strict=False)
    for key, value in sorted(env.items()):
        parts = key.split("_", 2)
        # *_FILE names a secret's path, which is not a setting.
        if len(parts) < 3 or parts[0] != "BATON" or parts[1].lower() not in SECTIONS or key.endswith("_FILE"):
            continue
        name, origin = f"{parts[1]}.{parts[2]}".lower(), f"environment {key}"
        if _known(name, origin, faults):
            given[name] = _Given(value, origin, strict=False)
    return given


def _known(name: str, origin: str, faults: list[SettingsError]) -> bool:
    """Is there a setting of this name? If not, that is noted."""
    section, _, field = name.partition(".")
    if section not in SECTIONS:
        faults.append(SettingsError(f"{origin}: unknown section [{section}]; {_choice(SECTIONS)}", param=name))
        return False
    fields = SECTIONS[section].model_fields
    if field not in fields:
        message = f"{origin}: unknown field {field!r} in [{section}]; {_choice(fields)}"
        faults.append(SettingsError(message, param=name))
        return False
    return True


def _checked(table_type: type[Section], section: str, field: str, given: _Given) -> Any:
    try:
        return getattr(table_type.model_validate({field: given.value}, strict=given.strict), field)
    except ValidationError as exc:
        raise SettingsError(
            f"{given.origin}: {section}.{field} = {given.value!r}: {reason(exc.errors()[0]['msg'])}",
            param=f"{section}.{field}",
        ) from exc


def _choice(names: Mapping[str, Any]) -> str:
    return f"known are {', '.join(names)}"
