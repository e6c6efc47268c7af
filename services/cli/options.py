"""Flags of `./baton up`, and the settings they stand for."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from shared.contracts.errors import SettingsError
from shared.settings.sections import Dtype, Quantization


def up_parser() -> argparse.ArgumentParser:
    """The parser of `up`; every flag wins over environment and file."""
    parser = argparse.ArgumentParser(prog="baton up", description="Start a stack and keep it running.")
    parser.add_argument("--model", metavar="PATH", help="folder of a Llama-architecture checkpoint, or a .gguf file")
    parser.add_argument("--name", metavar="NAME", help="name clients ask for")
    parser.add_argument("--dtype", choices=get_args(Dtype), help="weights and KV (default auto)")
    parser.add_argument("--quant", choices=get_args(Quantization), help="how weights of layers are kept (default none)")
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on (default 8080; 0 takes a free one)")
    parser.add_argument("--prefill", type=int, metavar="N", help="number of prefill workers (default 1)")
    parser.add_argument("--decode", type=int, metavar="N", help="number of decode workers (default 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="most compute threads of each worker")
    parser.add_argument("--fake", action="store_true", default=None, help="workers that make up tokens")
    parser.add_argument("--config", metavar="FILE", help="settings file (default baton.toml)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="any other setting, as ./baton config show lists them",
    )
    parser.add_argument("--detach", action="store_true", help="return when ready and leave the stack running")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the screen")
    return parser


def up_flags(options: argparse.Namespace) -> dict[str, Any]:
    """`section.field` to value for `load_settings`. Raises SettingsError for a --set without `=`."""
    flags: dict[str, Any] = {
        "model.path": options.model,
        "model.name": options.name or _model_name(options.model),
        "model.dtype": options.dtype,
        "engine.quant": options.quant,
        "gateway.host": options.host,
        "gateway.port": options.port,
        "workers.prefill": options.prefill,
        "workers.decode": options.decode,
        "workers.fake": options.fake,
        "engine.threads": options.threads,
    }
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"--set {pair}: expected SECTION.FIELD=VALUE", param="--set")
        flags[name.strip()] = value
    return flags


def _model_name(folder: str | None) -> str | None:
    """A local checkpoint goes by its folder's or file's name unless told otherwise."""
    return folder.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or None if folder else None
