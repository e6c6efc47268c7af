"""The native kernels at `./baton up`: built before the workers start, so that none of them waits for a compiler."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.native.build import NativeUnavailable, library_for_machine
from shared.model.fetch import cache_dir
from shared.settings.models import served_models
from shared.settings.sections import Settings


def prepare_kernels(settings: Settings, env: Mapping[str, str]) -> str:
    """Build the library if these settings want it and it is not there. Returns a line about it, or nothing."""
    quantized = any(model.quant != "none" for model in served_models(settings))
    if settings.workers.fake or not (settings.engine.kernels == "native" or quantized):
        return ""
    try:
        built = library_for_machine(cache_dir(env) / "kernels", env)
    except NativeUnavailable as exc:
        return f"{exc}; torch computes instead, more slowly"
    return f"native kernels for {built.level}"
