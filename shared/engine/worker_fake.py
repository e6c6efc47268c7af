"""The engine of a `--fake` worker: made-up tokens, a tiny pool of real bytes, no torch.

The pool is a file like any other, locked by its owner, so that hand-off, digests and the detection of a death are the
real ones; only what is in the spans means nothing.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.engine.fake_constrained import FakeConstrained
from shared.engine.fake_runner import FakeRunner
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.worker_engine import WorkerEngine, WorkerFacts, WorkerOptions, fake_step_time
from shared.grammar.compiler import LazyCompiler
from shared.kv.layout import LayerGroup, PoolLayout, fingerprint
from shared.kv.pool_file import SUFFIX, make_locked
from shared.model.config import load_config

NUMERICS = "fake"
MAX_POSITIONS = 8192
MAX_BLOCKS = 4096


class FakePool:
    """A locked pool file in memory, unlinked by `close`."""

    def __init__(self, folder: Path, worker: WorkerId, layout: PoolLayout) -> None:
        self.layout = layout
        self.path = folder / f"{worker}{SUFFIX}"
        self._fd, temporary = make_locked(folder)
        os.posix_fallocate(self._fd, 0, layout.total_bytes)
        self._map = mmap.mmap(self._fd, layout.total_bytes)
        self._bytes = memoryview(self._map)
        temporary.rename(self.path)

    def span(self, group: int, block_id: int) -> memoryview:
        """One block's bytes. Raises IndexError outside the pool."""
        offset = self.layout.block_offset(group, block_id)
        return self._bytes[offset : offset + self.layout.groups[group].span_bytes]

    def close(self) -> None:
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


MARKS = 0x7C
"""Bytes below this make no float16 that is infinite or no number: such KV is not handed over."""


class FakeKvRunner:
    """A FakeRunner that also writes each token's slot, so that a wrong or torn copy of a span shows."""

    def __init__(self, runner: FakeRunner, pool: FakePool) -> None:
        self._runner = runner
        self._pool = pool

    def run(self, plan: StepPlan) -> StepOutput:
        for row in plan.sequences:
            for group, (spec, table) in enumerate(zip(self._pool.layout.groups, row.block_tables, strict=True)):
                width = spec.token_bytes // (2 * len(spec.layers) * spec.num_kv_heads)
                for position, token in enumerate(row.token_ids, start=row.start):
                    if position < row.stored_from:
                        continue
                    span = self._pool.span(group, table[position // spec.block_size])
                    slot = position % spec.block_size * width
                    mark = token % MARKS if token >= 0 else MARKS - 1
                    for tile in range(0, len(span), spec.block_size * width):
                        span[tile + slot : tile + slot + width] = bytes([mark]) * width
        return self._runner.run(plan)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        for group, block_id in blocks:
            span = self._pool.span(group, block_id)
            span[:] = bytes(len(span))


def open_fake(options: WorkerOptions, worker: WorkerId) -> WorkerEngine:
    """A fake worker's engine. Raises SettingsError when the pool's folder can't be used."""
    # four bytes a token, without scales
    groups = (LayerGroup("full", (0,), 1, 1, options.block_size, "float16"),)
    num_blocks = max(2, min(MAX_BLOCKS, options.pool_bytes // groups[0].span_bytes))
    layout = PoolLayout(groups, (num_blocks,))
    digest = hashlib.blake2b(b"fake model", digest_size=16).hexdigest()
    facts = WorkerFacts(
        layout=layout,
        fingerprint=fingerprint(groups, digest, NUMERICS),
        numerics=NUMERICS,
        model_digest=digest,
        eos_token_ids=frozenset(_ends(options.model_dir)),
        max_positions=MAX_POSITIONS,
        fake=True,
    )
    pool = FakePool(options.kv_dir, worker, layout)
    grammars = LazyCompiler(options.model_dir, facts.eos_token_ids)
    runner = FakeRunner(step_time=fake_step_time(options.fake_speed), constrained=FakeConstrained(grammars))
    return WorkerEngine(options, facts, pool, FakeKvRunner(runner, pool), grammars=grammars)


def _ends(folder: Path) -> tuple[int, ...]:
    """What ends an output under a grammar; nothing where there is no model's folder, which fakes can do without."""
    try:
        return load_config(folder).eos_token_ids
    except SettingsError:
        return ()
