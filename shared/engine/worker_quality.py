"""What a worker says of the quality of what it computes, and the number format of a GPU's where nobody decided."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from shared.engine.worker_engine import WorkerEngine, WorkerOptions
from shared.model.config import packed_as
from shared.model.digest import model_digest
from shared.model.fetch import cache_dir
from shared.model.quality_gate import AUTO, SAME, Configuration, open_gate

log = logging.getLogger("baton.worker")

_GPU_KERNELS = "triton"


def told_quality(configuration: Configuration, digest: str, numerics: str, warn: bool) -> str:
    """The line about a configuration of a model.

    Args:
        warn: log it where it did not pass, or was never measured.
    """
    gate = open_gate(cache_dir(os.environ))
    line = gate.describe(digest, configuration, numerics)
    if warn and not gate.allows(digest, configuration):
        log.warning("%s", line)
    return line


def on_gpu(options: WorkerOptions) -> WorkerOptions:
    """Options with the dtype decided, as `shared.model.decoder.load_decoder` decides it for a CPU."""
    if options.dtype != AUTO:
        return options
    gate = open_gate(cache_dir(os.environ))
    kept = packed_as(options.model_dir) or "none"
    return replace(options, dtype=gate.default_dtype(model_digest(options.model_dir), _GPU_KERNELS, kept))


def with_quality(core: WorkerEngine) -> WorkerEngine:
    """A GPU's engine that tells of its quality."""
    facts, options = core.facts, core.options
    kv = SAME if options.kv_dtype == options.dtype else options.kv_dtype
    quant = packed_as(options.model_dir) or options.quant
    configuration = Configuration(_GPU_KERNELS, options.dtype, quant, kv)
    line = told_quality(configuration, facts.model_digest, facts.numerics, warn=options.samples)
    core.facts = replace(facts, computes=line)
    return core
