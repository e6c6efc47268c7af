"""Reads the settings: flag > environment > file > default, and remembers where each value came from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.contracts.errors import SettingsError
from shared.settings.models import parse_models
from shared.settings.sections import SECTIONS, ModelEntry, Section, Settings
from shared.settings.toml_lines import key_lines

SCHEMA = 1
CONFIG_VARIABLE = "BATON_CONFIG"
CONFIG_NAME = "baton.toml"
SHORT_NAMES = {
    "NATS_URL": "bus.nats_url",
    "REDIS_URL": "store.redis_url",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "telemetry.otlp_endpoint",
}
"""Variables other tools use too. `BATON_<SECTION>_<FIELD>` wins over them."""
MODELS_VARIABLE = "BATON_MODELS"
"""The `[[models]]` tables as JSON. Set, also to [], it stands for all a file says of models."""

ROOT = Path(__file__).resolve().parents[2]


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


def load_settings(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, file: Path | None = None
) -> LoadedSettings:
    """The settings of this process.

    Args:
        flags: `section.field` to value; None values are left out.
        env: the environment; `BATON_<SECTION>_<FIELD>`, `BATON_MODELS`, `NATS_URL`, `REDIS_URL`.
        file: a `baton.toml`; None when there is none.

    Raises SettingsError naming the flag, variable, or file and line: unknown field, wrong type, value out of range,
    both `[model]` and `[[models]]`.
    """
    given, models = _from_file(file) if file is not None else ({}, None)
    if (told := _models_from_environment(env or {})) is not None:
        models = told
        given = {name: found for name, found in given.items() if not name.startswith("model.")}
    given |= _from_environment(env or {})
    for name, value in (flags or {}).items():
        if value is not None:
            given[_known(name, "flag")] = _Given(value, "flag", strict=False)
    tables: dict[str, Section] = {}
    for section, table_type in SECTIONS.items():
        values: dict[str, Any] = {}
        for field in table_type.model_fields:
            if (found := given.get(f"{section}.{field}")) is not None:
                values[field] = _checked(table_type, section, field, found)
        tables[section] = table_type(**values)
    if models is not None and models.entries:
        _require_one_form(given, models)
    origins = {
        name: given[name].origin if name in given else "default"
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


def _from_file(path: Path) -> tuple[dict[str, _Given], _Models | None]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise SettingsError(f"{path}: {exc}", param=str(path)) from exc
    lines = key_lines(text)

    def place(name: str) -> str:
        return f"{path}:{lines.get(name, 1)}"

    schema = tables.pop("schema", None)
    if schema != SCHEMA:
        found = "is missing" if schema is None else f"is {schema!r}"
        raise SettingsError(f"{place('schema')}: schema {found}; this version reads schema = {SCHEMA}", param="schema")
    models = None
    if "models" in tables:
        models = _models(tables.pop("models"), place("models"), place)
    given: dict[str, _Given] = {}
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise SettingsError(f"{place(section)}: unknown section [{section}]; {_choice(SECTIONS)}", param=section)
        for field, value in table.items():
            name = f"{section}.{field}"
            given[_known(name, place(name))] = _Given(value, place(name), strict=True)
    return given, models


def _models_from_environment(env: Mapping[str, str]) -> _Models | None:
    text, origin = env.get(MODELS_VARIABLE, ""), f"environment {MODELS_VARIABLE}"
    if not text.strip():
        return None
    try:
        tables = json.loads(text)
    except ValueError as exc:
        raise SettingsError(f"{origin}: not JSON: {exc}", param=MODELS_VARIABLE) from exc
    return _models(tables, origin, lambda name: f"{origin}: {name}")


def _models(tables: Any, origin: str, place: Callable[[str], str]) -> _Models:
    entries = parse_models(tables, place)
    origins = {
        f"models.{number}.{field}": place(f"models.{number}.{field}") if field in table else "default"
        for number, table in enumerate(tables)
        for field in ModelEntry.model_fields
    }
    return _Models(entries, origin, origins)


def _require_one_form(given: Mapping[str, _Given], models: _Models) -> None:
    for name, found in given.items():
        if name.startswith("model."):
            raise SettingsError(
                f"{found.origin}: {name} and {models.origin}: [[models]] are both given; "
                "name one model in [model] or all of them in [[models]]",
                param=name,
            )


def _from_environment(env: Mapping[str, str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for short, name in SHORT_NAMES.items():
        if env.get(short):
            given[name] = _Given(env[short], f"environment {short}", strict=False)
    for key, value in sorted(env.items()):
        parts = key.split("_", 2)
        # *_FILE names a secret's path, which is not a setting.
        if len(parts) < 3 or parts[0] != "BATON" or parts[1].lower() not in SECTIONS or key.endswith("_FILE"):
            continue
        name = _known(f"{parts[1]}.{parts[2]}".lower(), f"environment {key}")
        given[name] = _Given(value, f"environment {key}", strict=False)
    return given


def _known(name: str, origin: str) -> str:
    section, _, field = name.partition(".")
    if section not in SECTIONS:
        raise SettingsError(f"{origin}: unknown section [{section}]; {_choice(SECTIONS)}", param=name)
    if field not in SECTIONS[section].model_fields:
        fields = SECTIONS[section].model_fields
        raise SettingsError(f"{origin}: unknown field {field!r} in [{section}]; {_choice(fields)}", param=name)
    return name


def _checked(table_type: type[Section], section: str, field: str, given: _Given) -> Any:
    try:
        return getattr(table_type.model_validate({field: given.value}, strict=given.strict), field)
    except ValidationError as exc:
        reason = exc.errors()[0]["msg"]
        raise SettingsError(
            f"{given.origin}: {section}.{field} = {given.value!r}: {reason[:1].lower()}{reason[1:]}",
            param=f"{section}.{field}",
        ) from exc


def _choice(names: Mapping[str, Any]) -> str:
    return f"known are {', '.join(names)}"
