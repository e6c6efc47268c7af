"""The equivalence matrix: one workload run in every way the engine can run it, and the bits of every logits row.

    company   alone: one sequence after the other     batched: 16 at once, of mixed lengths
    cache     cold: nothing is held                   warm: every full block of every prompt is held and tagged
    chunk     16 or 512: most tokens of one sequence in a step
    path      local                                   handed_off: a second pool computes all but the last prompt token
    depth     0 or 1: steps planned while one is in flight
    mode      continuous                              static, dynamic: whole batches, one after the other
              preempted: blocks are taken at seeded moments, in prompts and outputs, with steps in flight
              speculated: each prompt comes with a prediction of its output that is right but for every sixth token

The first five columns make 32 cells of continuous batching; the other modes run in some of those that are batched.

Of a speculated cell the rows behind a wrong guess are left out: they belong to a text that is not to be.

Uses the real batcher, pools and model runner in one process. Pools are filled with NaN first, so that a slot read
before it is written shows. Rows are kept as XXH3-128 digests of their float32 bytes: equal digests mean equal bits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from shared.contracts.attempt import Attempt
from shared.contracts.ids import BlockTag, Dispatch, Epoch, RequestId, TenantId, WorkerId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.batching_policy import BATCHING, Batching
from shared.engine.engine import Engine
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan
from shared.engine.step_time import StepTimeModel
from shared.kv.block_table import BlockTable
from shared.kv.digest import span_digest
from shared.kv.layout import PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.kv.transfer import zero_rest
from shared.model.config import layer_groups
from shared.model.decoder import Model

BLOCK_SIZE = 32
BATCH = 16
TOKEN_BUDGET = 512
BATCH_SIZE = 5  # of static and dynamic batches: not a divisor of 16, so that the last is not full
WINDOW_S = 1.0
PREEMPTIONS = 3
"""How often each sequence of a preempted cell loses its blocks at most."""
_SPARE_BLOCKS = 40
_PLAN_S = 0.25
"""Time that passes between two plans."""

Rows = dict[tuple[int, int], bytes]
"""(prompt, absolute position of the row) → digest of its logits."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to run the workload."""

    company: str  # alone | batched
    cache: str  # cold | warm
    chunk: int  # 16 | 512
    path: str  # local | handed_off
    depth: int  # 0 | 1
    mode: str = "continuous"  # continuous | preempted | static | dynamic | speculated

    def __str__(self) -> str:
        name = f"{self.company}-{self.cache}-{self.chunk}-{self.path}-{self.depth}"
        return name if self.mode == "continuous" else f"{name}-{self.mode}"

    @property
    def batching(self) -> Batching:
        return next((name for name in BATCHING if name == self.mode), "continuous")


ORACLE = Cell("alone", "cold", 512, "local", 0)
ALL = tuple(
    itertools.starmap(
        Cell, itertools.product(("alone", "batched"), ("cold", "warm"), (512, 16), ("local", "handed_off"), (0, 1))
    )
)
PAIRWISE = (
    Cell("alone", "warm", 16, "handed_off", 1),
    Cell("batched", "cold", 16, "local", 1),
    Cell("batched", "warm", 512, "local", 0),
    Cell("batched", "cold", 512, "handed_off", 1),
    Cell("alone", "cold", 16, "handed_off", 0),
    Cell("alone", "warm", 512, "local", 1),
    Cell("batched", "warm", 16, "handed_off", 0),
)
"""With the oracle: every pair of values of two columns occurs together."""
_IN_MODES = (
    ("cold", 512, "local", 1),
    ("cold", 16, "handed_off", 1),
    ("warm", 512, "handed_off", 0),
    ("warm", 16, "local", 0),
)
MODES = tuple(
    Cell("batched", cache, chunk, path, depth, mode)
    for mode in ("preempted", "static", "dynamic", "speculated")
    for cache, chunk, path, depth in _IN_MODES
)
FREE_ROWS = StepTimeModel(0.0, 1e-6, 0.0, 0.0, floor_s=0.05)
"""Of speculated cells: guesses cost nothing, so as many are made as there are."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: tuple[int, ...]
    sampling: SamplingParams
    committed: tuple[int, ...] = ()  # output tokens of an earlier attempt, on resume

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What a worker is given."""
        return self.text + self.committed


@dataclass(slots=True)
class CellResult:
    tokens: dict[int, list[int]] = field(default_factory=dict)  # prompt → sampled tokens
    rows: Rows = field(default_factory=dict)
    computed_tokens: int = 0  # positions given to the measured sequences' steps, without the other pool's
    cached_tokens: int = 0
    received_tokens: int = 0
    wasted_tokens: int = 0
    preemptions: int = 0
    rows_again: int = 0  # rows computed a second time, with the same bits
    steps: int = 0
    widest_step: int = 0  # most sequences in one step
    guesses: int = 0  # tokens guessed
    right: int = 0  # those that were right


def make_prompts(lengths: Sequence[int], vocab_size: int, max_tokens: int, seed: int = 0) -> list[Prompt]:
    """Random prompts of these lengths; greedy, plain, top-p and top-k sampling in turn."""
    rng = np.random.default_rng(seed)
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 40},
    )
    return [
        Prompt(
            tuple(int(t) for t in rng.integers(3, vocab_size, length)),
            SamplingParams(max_tokens=max_tokens, seed=1000 + i, ignore_eos=True, **kinds[i % len(kinds)]),
        )
        for i, length in enumerate(lengths)
    ]


def with_predictions(prompts: Sequence[Prompt], outputs: Mapping[int, Sequence[int]], vocab_size: int) -> list[Prompt]:
    """The prompts with their outputs as predictions, every sixth token of which is another one."""
    predicted = []
    for i, prompt in enumerate(prompts):
        tokens = [3 + (t + 1) % (vocab_size - 3) if n % 6 == 3 else t for n, t in enumerate(outputs[i])]
        sampling = msgspec.structs.replace(prompt.sampling, prediction=pack_tokens(tokens))
        predicted.append(replace(prompt, sampling=sampling))
    return predicted


def tags_of(token_ids: Sequence[int]) -> tuple[BlockTag, ...]:
    """Stand-ins for the keyed tags of the full blocks of a prompt."""
    ends = range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)
    return tuple(BlockTag(xxhash.xxh3_128(np.array(token_ids[:end], np.int64).tobytes()).digest()) for end in ends)


class Worker:
    """One pool with its batcher and runner, and the loop that the engine's two threads amount to."""

    def __init__(
        self, model: Model, pool: Pool, config: BatcherConfig, *, every_row: bool, preempting: bool = False
    ) -> None:
        self.pool = pool
        self.batcher = Batcher(pool.layout, config)
        self.result = CellResult()
        self._runner = ModelRunner(model, pool, self._record)
        self._every_row = every_row
        self._rows: list[tuple[str, int, bytes]] = []  # of the step that runs
        self._now = 0.0
        self._moments = random.Random(0) if preempting else None
        self._taken: Counter[str] = Counter()

    def drain(self) -> list[SequenceUpdate]:
        """Keep depth + 1 steps in flight until nothing runs."""
        updates = self.batcher.take_updates()
        flying: list[StepPlan] = []
        last: StepPlan | None = None
        while True:
            self._zero()
            self._preempt(sorted({row.seq_id for plan in (*flying, last) if plan for row in plan.sequences}))
            while (plan := self._plan()) is not None:
                flying.append(plan)
            if not flying and self.batcher.wait_s(self._now) < math.inf:
                continue  # a dynamic batch gathers
            if not flying:
                self.batcher.check()
                return updates
            last = flying.pop(0)
            updates += self.batcher.commit(self.run(last))

    def tag(self, updates: Sequence[SequenceUpdate], prompts: dict[str, Prompt]) -> None:
        """Make the completed blocks of prompts findable."""
        for update in updates:
            tags = tags_of(prompts[update.seq_id].token_ids)
            for block in update.completed[0]:
                if block.position < len(tags):
                    self.batcher.tag(0, block.block_id, block.generation, tags[block.position], block.token_ids)

    def _plan(self) -> StepPlan | None:
        self._now += _PLAN_S
        return self.batcher.plan(self._now)

    def _preempt(self, seq_ids: Sequence[str]) -> None:
        """Now and then take the blocks of some of the sequences that ran last, some of which have a step in flight."""
        if self._moments is None or self._moments.random() < 0.2:
            return
        for seq_id in self._moments.sample(seq_ids, min(3, len(seq_ids))):
            if self._taken[seq_id] < PREEMPTIONS:
                self._taken[seq_id] += self.batcher.preempt(seq_id)

    def _zero(self) -> None:
        blocks = self.batcher.take_blocks_to_zero()
        self.zero_blocks(blocks)
        self.batcher.zeroed(blocks)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        for group, block_id in blocks:
            self.pool.zero_blocks(group, [block_id])

    def run(self, plan: StepPlan) -> StepOutput:
        """One step, every logits row recorded on the way."""
        self.result.steps += 1
        self.result.widest_step = max(self.result.widest_step, len(plan.sequences))
        # logits of every position; the batcher asked for the last one's tokens only
        wide = replace(plan, sequences=tuple(_every_row(row) for row in plan.sequences)) if self._every_row else plan
        output = self._runner.run(wide)
        if self._every_row:
            pairs = zip(plan.sequences, output.sampled, strict=True)
            output = replace(output, sampled=tuple(t if row.drafted else t[-1:] for row, t in pairs))
        self._keep_rows(plan, output)
        return output

    def _keep_rows(self, plan: StepPlan, output: StepOutput) -> None:
        """Rows of the step that has ended, without those behind a wrong guess."""
        ends = {
            row.seq_id: row.start + len(tokens)
            for row, tokens in zip(plan.sequences, output.sampled, strict=True)
            if row.drafted
        }
        for seq_id, position, digest in self._rows:
            if position < ends.get(seq_id, math.inf):
                self._keep(seq_id, position, digest)
        self._rows.clear()

    def _record(self, seq_id: str, position: int, logits: Tensor) -> None:
        if not seq_id.startswith("run-"):
            return
        assert logits.dtype == torch.float32
        assert bool(torch.isfinite(logits).all()), f"{seq_id} at {position}: a logit is not finite"
        self._rows.append((seq_id, position, xxhash.xxh3_128(logits.contiguous().numpy().data).digest()))

    def _keep(self, seq_id: str, position: int, digest: bytes) -> None:
        key = (int(seq_id.partition("-")[2]), position)
        if (before := self.result.rows.setdefault(key, digest)) is not digest:
            assert self._taken[seq_id], f"{seq_id}: position {position} was computed twice"
            assert before == digest, f"{seq_id}: position {position} came out differently the second time"
            self.result.rows_again += 1


def _every_row(row: ScheduledSequence) -> ScheduledSequence:
    return msgspec.structs.replace(row, num_logits=len(row.token_ids))


def run_cell(
    cell: Cell, model: Model, dtype: str, prompts: Sequence[Prompt], folder: Path, *, every_row: bool = True
) -> CellResult:
    """Run the workload one way.

    Args:
        dtype: of the KV: the model's, int8 or float16.
        folder: where the pool files go; both are removed again.
        every_row: record the logits of prompt positions too, not only of those sampled from.
    """
    groups = BATCH if cell.company == "batched" else 1
    with contextlib.ExitStack() as stack:
        decode = stack.enter_context(_worker("decode", cell, model, dtype, prompts, folder, every_row))
        prefill = None
        if cell.path == "handed_off":
            prefill = stack.enter_context(_worker("prefill", cell, model, dtype, prompts, folder, every_row))
        if cell.cache == "warm":
            for worker in (decode, prefill):
                if worker is not None:
                    _warm(worker, prompts)
        for first in range(0, len(prompts), groups):
            _run_group(cell, dict(list(enumerate(prompts))[first : first + groups]), decode, prefill)
        for worker in (decode, prefill):
            if worker is not None:
                assert worker.batcher.is_idle
                worker.batcher.check()
        if prefill is not None:
            # rows the other pool computed stand in the same table: together they cover the same positions
            both = decode.result.rows.keys() & prefill.result.rows.keys()
            assert cell.mode == "preempted" or not both
            assert all(decode.result.rows[key] == prefill.result.rows[key] for key in both)
            decode.result.rows |= prefill.result.rows
        return decode.result


def run_engine(
    model: Model, dtype: str, prompts: Sequence[Prompt], folder: Path, mode: str = "continuous"
) -> dict[int, list[int]]:
    """Tokens of the batched, cold, local cell at depth 1 of a mode, by the engine's own threads."""
    tokens: dict[int, list[int]] = {}
    left = threading.Semaphore(0)

    def take(updates: list[SequenceUpdate]) -> None:
        for update in updates:
            tokens.setdefault(int(update.seq_id.partition("-")[2]), []).extend(update.token_ids)
            if update.finish:
                left.release()

    cell = Cell("batched", "cold", 512, "local", 1, mode)
    with _worker("engine", cell, model, dtype, prompts, folder, every_row=False) as worker:
        engine = Engine(worker.batcher, worker, take)
        engine.start()
        for i, prompt in enumerate(prompts):
            spec = _spec(f"run-{i}", prompt, cell)
            engine.call(lambda batcher, spec=spec: batcher.reserve(spec)).result(60)  # type: ignore[misc]
        ended = all(left.acquire(timeout=60) for _ in prompts)
        assert engine.stop(60)
        assert ended
        assert worker.batcher.is_idle
    return tokens


def differences(result: CellResult, oracle: CellResult) -> list[str]:
    """What differs, in words; empty when all tokens and all rows that the cell computed are equal."""
    found = [f"prompt {i}: tokens differ" for i in oracle.tokens if result.tokens.get(i) != oracle.tokens[i]]
    wrong = [key for key, digest in sorted(result.rows.items()) if oracle.rows.get(key) != digest]
    if wrong:
        prompt, position = wrong[0]
        found.append(f"{len(wrong)} of {len(result.rows)} rows differ, first at prompt {prompt} position {position}")
    return found


def sampled_rows(prompts: Sequence[Prompt]) -> set[tuple[int, int]]:
    """(prompt, position) of every row that is sampled from: the least that a cell must have computed."""
    return {
        (i, len(prompt.token_ids) - 1 + k)
        for i, prompt in enumerate(prompts)
        for k in range(prompt.sampling.max_tokens)
    }


def _run_group(cell: Cell, prompts: dict[int, Prompt], decode: Worker, prefill: Worker | None) -> None:
    tables: dict[int, BlockTable] = {}
    for i, prompt in prompts.items():
        handed_off = prefill is not None and len(prompt.token_ids) > 1
        tables[i] = decode.batcher.reserve(_spec(f"run-{i}", prompt, cell, await_kv=handed_off)).tables[0]
    if prefill is not None:
        hand_off(cell, prompts, prefill, decode, tables)
    for update in decode.drain():
        number = int(update.seq_id.partition("-")[2])
        tokens = decode.result.tokens.setdefault(number, [])
        assert update.first_seq == len(prompts[number].committed) + len(tokens)
        tokens.extend(update.token_ids)
        if update.totals is not None:
            assert update.finish == "length"
            decode.result.computed_tokens += update.totals.computed_tokens
            decode.result.cached_tokens += update.totals.cached_tokens
            decode.result.received_tokens += update.totals.received_tokens
            decode.result.wasted_tokens += update.totals.wasted_tokens
            decode.result.preemptions += update.totals.preemptions
            decode.result.guesses += update.totals.drafted_tokens
            decode.result.right += update.totals.accepted_tokens


def hand_off(
    cell: Cell, prompts: dict[int, Prompt], prefill: Worker, decode: Worker, targets: dict[int, BlockTable]
) -> None:
    """Compute every prompt without its last token in one pool, and copy the spans the other one lacks."""
    # seen from the decode pool, a prompt of n tokens: [0, hit) is shared there, [hit, n - 1) pulled, n - 1 computed
    sources: dict[int, BlockTable] = {}
    for i, prompt in prompts.items():
        if len(prompt.token_ids) > 1:
            kv = Prompt(prompt.token_ids[:-1], prompt.sampling)
            sources[i] = prefill.batcher.reserve(_spec(f"run-{i}", kv, cell, compute_only=True)).tables[0]
    for update in prefill.drain():
        assert update.finish in ("", "computed")
    for i, source in sources.items():
        seq_id, num_tokens = f"run-{i}", len(prompts[i].token_ids) - 1
        target = targets[i]
        attempt = Attempt(RequestId(seq_id), Epoch(1), Dispatch(1))
        valid = num_tokens % BLOCK_SIZE
        if valid and len(source) > source.num_shared:
            tail = bytes(prefill.pool.span(0, source.block_ids[-1]))
            zeroed = bytearray(tail)
            zero_rest(memoryview(zeroed), prefill.pool.layout.groups[0], valid)
            assert tail == zeroed, "a tail is not zeroed"
        for position in range(target.num_shared, len(source)):
            generation = source.generations[position]
            here, there = (
                decode.pool.span(0, target.block_ids[position]),
                prefill.pool.span(0, source.block_ids[position]),
            )
            committed = span_digest(there, attempt, 0, generation, position)
            here[:] = there
            assert span_digest(here, attempt, 0, generation, position) == committed
        assert prefill.batcher.unpin(seq_id)
        decode.batcher.kv_received(seq_id, num_tokens)
        decode.batcher.release(seq_id)


def _warm(worker: Worker, prompts: Sequence[Prompt]) -> None:
    """Compute and tag every prompt, then let go of it."""
    for first in range(0, len(prompts), BATCH):
        named = {f"warm-{i}": prompt for i, prompt in list(enumerate(prompts))[first : first + BATCH]}
        for seq_id, prompt in named.items():
            worker.batcher.reserve(_spec(seq_id, prompt, ORACLE, compute_only=True))
        worker.tag(worker.drain(), named)
        for seq_id in named:
            assert worker.batcher.unpin(seq_id)
    worker.result = CellResult()


def _spec(
    seq_id: str, prompt: Prompt, cell: Cell, *, compute_only: bool = False, await_kv: bool = False
) -> SequenceSpec:
    return SequenceSpec(
        seq_id=seq_id,
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.text),
        sampling=prompt.sampling,
        tags=(tags_of(prompt.token_ids),) if cell.cache == "warm" else (),
        tenant=TenantId(f"tenant-{prompt.sampling.seed % 3}"),
        compute_only=compute_only,
        await_kv=await_kv,
    )


@contextlib.contextmanager
def _worker(
    name: str, cell: Cell, model: Model, dtype: str, prompts: Sequence[Prompt], folder: Path, every_row: bool
) -> Iterator[Worker]:
    slots = [len(prompt.token_ids) + prompt.sampling.max_tokens for prompt in prompts]
    held = sum(sorted(-(-count // BLOCK_SIZE) for count in slots)[-BATCH:])
    cached = sum(len(prompt.token_ids) // BLOCK_SIZE for prompt in prompts)
    layout = PoolLayout(
        layer_groups(model.config, BLOCK_SIZE, dtype, tile_layout=model.kernels.tile_layout),
        (held + cached + _SPARE_BLOCKS,),
    )
    config = BatcherConfig(
        token_budget=TOKEN_BUDGET,
        max_num_seqs=BATCH,
        chunk_size=cell.chunk,
        depth=cell.depth,
        quantum=24,
        batching=cell.batching,
        batch_size=BATCH_SIZE,
        batch_window_s=WINDOW_S,
        most_drafted=4 if cell.mode == "speculated" else 0,
    )
    with create_pool(folder, WorkerId(name), layout) as pool:
        for group, num_blocks in enumerate(layout.num_blocks):
            for block_id in range(num_blocks):
                never = pool.span(group, block_id)
                never[:] = b"\xff" * len(never)  # NaN, whatever elements or scales are
        preempting = cell.mode == "preempted" and name == "decode"
        worker = Worker(model, pool, config, every_row=every_row, preempting=preempting)
        if cell.mode == "speculated":
            worker.batcher.step_model = FREE_ROWS
        yield worker
