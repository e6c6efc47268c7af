"""`./baton config check|show|schema`: are the settings right, what are they, and where did each come from."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.words import sentence
from services.gateway.edge import make_edge
from shared.contracts.errors import SettingsError
from shared.kv import transfer_options
from shared.model.gguf_folder import is_gguf
from shared.settings.load import DEFAULT, LoadedSettings, read_settings, settings_file
from shared.settings.models import kv_conflict, quant_conflict, served_models
from shared.settings.request_classes import classes_conflict
from shared.settings.sections import Settings

EXIT_WRONG = 2
_USER_INFO = re.compile(r"(?<=://)(?:([^/@:]*):)?[^/@]*@")


def main(argv: Sequence[str]) -> int:
    """Run the command; 2 when a setting is wrong."""
    options = _parser().parse_args(argv)
    if options.what == "schema":
        print(json.dumps(schema(), indent=2))
        return 0
    env = dict(os.environ)
    try:
        path = settings_file(env, options.config)
    except SettingsError as exc:
        print(f"baton config: {exc.message}", file=sys.stderr)
        return EXIT_WRONG
    loaded, faults = read_settings(env=env, file=path)
    findings = [fault.message for fault in faults]
    findings += problems(loaded, frozenset(fault.param for fault in faults))
    if options.what == "check" and options.json:
        print(json.dumps({"file": str(path or ""), "ok": not findings, "problems": findings}))
        return EXIT_WRONG if findings else 0
    for line in findings:
        print(f"baton config: {line}", file=sys.stderr)
    if options.what == "show":
        print(json.dumps(as_json(loaded), indent=2) if options.json else "\n".join(lines(loaded)))
    elif not findings:
        print(f"{path or 'no settings file'}: ok")
    return EXIT_WRONG if findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton config", description="Check or show the settings.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="check|show|schema")
    for name, summary in (
        ("check", "say all that is wrong, with file and line; nothing is started"),
        ("show", "every setting in force, and where it came from"),
        ("schema", "the JSON schema of baton.toml"),
    ):
        command = commands.add_parser(name, help=summary, description=sentence(summary))
        if name != "schema":
            command.add_argument("--config", metavar="FILE", help="settings file (default baton.toml)")
            command.add_argument("--json", action="store_true", help="as JSON")
    return parser


def schema() -> dict[str, Any]:
    """JSON schema of a settings file. Pure."""
    found = Settings.model_json_schema()
    found["properties"] = {"schema": {"const": 1, "description": "version of this format"}, **found["properties"]}
    found["required"] = ["schema"]
    return found


def problems(loaded: LoadedSettings, faulty: Collection[str] = ()) -> Iterator[str]:
    """What is wrong although each value by itself is allowed; looks at the files the settings name.

    Args:
        faulty: `section.field` of values already found wrong, of which nothing more is said.
    """
    settings = loaded.settings

    def told(name: str, what: str, *others: str) -> str:
        """`FILE:LINE: name = …`, with the place of the first of the values that is not a default."""
        origins = (loaded.origins.get(one, DEFAULT) for one in (name, *others))
        place = next((f"{origin}: " for origin in origins if origin != DEFAULT), "")
        return f"{place}{name} = {value_of(settings, name)!r}{what}"

    most = "engine.max_sequences"
    for name in ("engine.token_budget", "engine.prefill_token_budget"):
        if value_of(settings, name) <= value_of(settings, most) and not {name, most} & set(faulty):
            yield told(name, f" must exceed {most} = {value_of(settings, most)}", most)
    for number, model in enumerate(served_models(settings)):
        path = Path(model.path).expanduser()
        if model.path and not (path.is_dir() or (is_gguf(path) and path.is_file())):
            kind = "file" if is_gguf(path) else "folder"
            yield told(f"models.{number}.path" if settings.models else "model.path", f": no such {kind}")
        if conflict := quant_conflict(settings, model):
            own = bool(settings.models) and settings.models[number].quant is not None
            yield told(f"models.{number}.quant" if own else "engine.quant", f" {conflict}")
        for field in ("prefill_classes", "decode_classes"):
            if conflict := classes_conflict(model, field.removesuffix("_classes"), settings.engine.classes):
                own = bool(settings.models) and getattr(settings.models[number], field) is not None
                yield told(f"models.{number}.{field}" if own else f"workers.{field}", f" {conflict}")
    if conflict := kv_conflict(settings):
        yield told("kv.dtype", f" {conflict}")
    if settings.policy.tenants:
        path = Path(settings.policy.tenants).expanduser()
        if not path.is_file():
            yield told("policy.tenants", ": no such file")
        elif (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield told("policy.tenants", f": mode {mode:04o} lets others read it; chmod 600 it")
    door = settings.gateway
    try:
        cert, key = (str(Path(path).expanduser()) if path else "" for path in (door.tls_cert, door.tls_key))
        make_edge(cert, key, door.trusted_proxies, door.cors_origins)
    except SettingsError as exc:
        yield told(exc.param, exc.message.removeprefix(exc.param), "gateway.tls_cert", "gateway.tls_key")
    try:
        transfer_options.transfer_options(settings.kv).require()
    except SettingsError as exc:
        yield told(exc.param, exc.message.removeprefix(exc.param), *transfer_options.SETTINGS)
    if settings.kv.dir and not Path(settings.kv.dir).expanduser().parent.is_dir():
        yield told("kv.dir", ": its parent folder does not exist")


def lines(loaded: LoadedSettings) -> list[str]:
    """One line a setting, `section.field = value  # origin`, aligned. Pure."""
    rows = [(f"{name} = {json.dumps(value)}", origin) for name, value, origin in _rows(loaded)]
    width = max(len(text) for text, _ in rows)
    return [f"{text:<{width}}  # {origin}" for text, origin in rows]


def as_json(loaded: LoadedSettings) -> Mapping[str, Any]:
    """`section.field` to value and origin. Pure."""
    return {name: {"value": value, "origin": origin} for name, value, origin in _rows(loaded)}


def _rows(loaded: LoadedSettings) -> Iterator[tuple[str, Any, str]]:
    for name, origin in loaded.origins.items():
        yield name, masked(value_of(loaded.settings, name)), origin


def value_of(settings: Settings, name: str) -> Any:
    """The value of `section.field` or `models.0.field`. Pure."""
    value: Any = settings
    for part in name.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def masked(value: Any) -> Any:
    """A value without the password or token an address may hold. Pure."""
    if isinstance(value, str):
        return _USER_INFO.sub(lambda found: f"{found[1]}:***@" if found[1] else "***@", value)
    if isinstance(value, dict):
        return {name: masked(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [masked(part) for part in value]
    return value.model_dump() if hasattr(value, "model_dump") else value
