"""The native kernels at `./baton up`: built before the workers start, so that none of them waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kernels.native.build import Built, library_for_machine
from kernels.native.compiler import ZIG, ZIG_SIZE, NativeUnavailable, NoCompiler, fetch_zig
from services.cli.cores import has_gpu
from shared.contracts.errors import SettingsError
from shared.model.fetch import cache_dir
from shared.settings.models import kv_conflict, quant_conflict, served_models
from shared.settings.sections import GPU_ONLY, Settings


def prepare_kernels(
    settings: Settings,
    env: Mapping[str, str],
    say: Callable[[str], None] = lambda line: None,
    fetch: Callable[[Path], None] = fetch_zig,
) -> str:
    """Build the library if these settings want it and it is not there. Returns a line about it, or nothing.

    Args:
        say: told what takes long.
        fetch: called where the machine has no C compiler; puts one into the folder.

    Raises:
        SettingsError: weights or KV are to be integers, which nothing else multiplies, and the library cannot be had.
    """
    engine, models = settings.engine, served_models(settings)
    for model in models:
        if conflict := quant_conflict(settings, model):
            raise SettingsError(f"quant {model.quant!r} of {model.name} {conflict}", param="engine.quant")
        if model.quant in GPU_ONLY and not (settings.workers.fake or has_gpu()):
            raise SettingsError(
                f"quant {model.quant!r} of {model.name} needs a GPU, and there is none here", param="engine.quant"
            )
    if conflict := kv_conflict(settings):
        raise SettingsError(f"kv.dtype {settings.kv.dtype!r} {conflict}", param="kv.dtype")
    if settings.kv.dtype == "fp8" and not (settings.workers.fake or has_gpu()):
        raise SettingsError("kv.dtype 'fp8' needs a GPU, and there is none here", param="kv.dtype")
    if settings.kv.dtype == "float16" and engine.device != "cpu" and not settings.workers.fake and has_gpu():
        raise SettingsError("kv.dtype 'float16' is for CPUs, and a GPU computes here", param="kv.dtype")
    wanting = [(f"quant {model.quant!r}", "engine.quant") for model in models if model.quant != "none"]
    wanting += [("kv.dtype 'int8'", "kv.dtype")] if settings.kv.dtype == "int8" else []
    on_gpu = engine.device != "cpu" and has_gpu()
    if settings.workers.fake or engine.kernels not in ("auto", "native") or on_gpu:
        return ""
    try:
        built = _built(cache_dir(env) / "kernels", env, say, fetch)
    except NativeUnavailable as exc:
        for what, param in wanting:
            raise SettingsError(f"{what} needs the native kernels: {exc}", param=param) from exc
        return f"{exc}; torch computes instead, more slowly"
    return f"native kernels for {built.level}"


def _built(folder: Path, env: Mapping[str, str], say: Callable[[str], None], fetch: Callable[[Path], None]) -> Built:
    try:
        return library_for_machine(folder, env)
    except NoCompiler:
        if env.get("CC"):
            raise
    say(f"no C compiler: fetching zig {ZIG} to build the native kernels with, once ({ZIG_SIZE})")
    fetch(folder)
    return library_for_machine(folder, env)
