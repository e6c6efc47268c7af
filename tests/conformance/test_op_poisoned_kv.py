"""OP-54: KV that is no number ends the request that reads it, and touches nobody else. Real workers, a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import messages as m
from shared.contracts.ids import BlockTag
from shared.contracts.parts import GroupTags, StreamRecord
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.worker_engine import WorkerEngine, WorkerOptions
from shared.engine.worker_shell import WorkerShell
from tests.native import require_native
from tests.pipeline.worker_support import Cell, attempt, cell, until
from tests.tiny_models import make_tiny_model

BLOCK, WAIT_S = 16, 60.0
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


def prompt_of(seed: int, length: int = 75) -> list[int]:
    return [(seed + 7 * i) % 320 for i in range(length)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def workers(model_dir: Path, folder: Path, **changes: Any) -> AsyncIterator[Cell]:
    """With so small a pool that every block is soon used by another."""
    options = WorkerOptions(
        model_dir=model_dir,
        kv_dir=folder / "kv",
        block_size=BLOCK,
        pool_bytes=100 * 4 * 2 * 2 * 16 * 4 * BLOCK,
        token_budget=48,
        chunk_size=BLOCK,
        max_num_seqs=8,
        threads=1,
        self_check=False,
        calibrate=False,
    )
    options = dataclasses.replace(options, **changes)
    async with cell(options, dataclasses.replace(options, chunk_size=2 * options.chunk_size)) as running:
        yield running
        await running.driver.idle([running.decode_id, running.prefill_id], WAIT_S)
        await running.check()


async def begin(
    c: Cell, name: str, prompt: list[int], sampling: SamplingParams, tags: Sequence[GroupTags] = ()
) -> None:
    reserved = await c.driver.reserve(c.decode_id, prompt, a=attempt(name), sampling=sampling, tags=tuple(tags))
    assert isinstance(reserved, m.Reserved), reserved


async def answer(
    c: Cell, name: str, prompt: list[int], tags: Sequence[GroupTags] = ()
) -> tuple[list[int], StreamRecord]:
    await begin(c, name, prompt, SHORT, tags)
    record = await c.driver.final(name, WAIT_S)
    return c.driver.output(name), record


async def has_begun(c: Cell, name: str, tokens: int = 3) -> None:
    await until(lambda: len(c.driver.tokens.get(attempt(name).request_id, {})) >= tokens, WAIT_S)


def poison(shell: WorkerShell, block: int) -> None:
    """Every element of a block, or every scale, is a NaN from now on."""
    span = shell.core.pool.span(0, block)
    span[:] = b"\xff" * len(span)


async def holds_numbers_only(shell: WorkerShell) -> None:
    """Once nothing waits to be overwritten: no block of the pool holds a NaN."""

    def bad() -> list[int]:
        blocks = range(shell.core.facts.layout.num_blocks[0])
        return [i for i in blocks if not WorkerEngine.are_finite(shell.core, [(0, i, 0, 0)])]

    await until(lambda: not bad(), WAIT_S)


async def blocks_of(c: Cell, name: str) -> list[int]:
    tables = c.decode.book.held[attempt(name).request_id].tables
    return list(tables[0].block_ids)


@pytest.mark.parametrize("position", [0, 2, -1])
async def test_op54_a_bad_block_ends_its_request_alone(model_dir: Path, tmp_path: Path, position: int) -> None:
    """The case on one worker, the block being a prompt's first, one in its middle, and the one that is written to."""
    async with workers(model_dir, tmp_path) as c:
        refs = {seed: (await answer(c, f"req-r{seed}", prompt_of(seed)))[0] for seed in range(4)}
        # Given one request and neighbours in the same steps
        await begin(c, "req-bad", prompt_of(0), LONG)
        for seed in (1, 2):
            await begin(c, f"req-n{seed}", prompt_of(seed), SHORT)
        await has_begun(c, "req-bad")
        # When a block of its KV becomes NaN
        blocks = await blocks_of(c, "req-bad")
        used = -(-(75 + len(c.driver.tokens[attempt("req-bad").request_id])) // BLOCK)
        poison(c.decode.shell, blocks[:used][position])
        # Then it ends with an error, long before its last token
        record = await c.driver.final("req-bad", WAIT_S)
        assert record.finish == "error"
        assert record.error is not None
        assert len(c.driver.tokens[attempt("req-bad").request_id]) < LONG.max_tokens
        # And its neighbours, who use its blocks after it, and the same prompt again equal the reference
        for seed in (1, 2):
            await c.driver.final(f"req-n{seed}", WAIT_S)
            assert c.driver.output(f"req-n{seed}") == refs[seed]
        await holds_numbers_only(c.decode.shell)
        for turn, seed in itertools.product(range(6), range(4)):
            output, record = await answer(c, f"req-l{turn}-{seed}", prompt_of(seed))
            assert (output, record.finish) == (refs[seed], "length")


@pytest.mark.parametrize("kv", ["auto", "float16", "int8"])
async def test_op54_whatever_kv_is_kept_in(model_dir: Path, tmp_path: Path, kv: str) -> None:
    """By the kernels that serve by default, which compute with integers where KV has scales."""
    require_native()
    formats = {"kernels": "native", "dtype": "bfloat16", "kv_dtype": kv, "block_size": 32, "chunk_size": 32}
    async with workers(model_dir, tmp_path, **formats) as c:
        refs = {seed: (await answer(c, f"req-r{seed}", prompt_of(seed)))[0] for seed in range(2)}
        await begin(c, "req-bad", prompt_of(0), LONG)
        await begin(c, "req-n", prompt_of(1), SHORT)
        await has_begun(c, "req-bad")
        poison(c.decode.shell, (await blocks_of(c, "req-bad"))[1])
        assert (await c.driver.final("req-bad", WAIT_S)).finish == "error"
        await c.driver.final("req-n", WAIT_S)
        assert c.driver.output("req-n") == refs[1]
        await holds_numbers_only(c.decode.shell)
        for turn, seed in itertools.product(range(4), range(2)):
            assert (await answer(c, f"req-l{turn}-{seed}", prompt_of(seed)))[0] == refs[seed]


def tags_of(name: str, count: int) -> tuple[GroupTags, ...]:
    return (GroupTags(0, tuple(BlockTag(f"{name}-{i}".encode().ljust(16)) for i in range(count))),)


async def test_op54_a_bad_block_of_the_prefix_cache_is_found_once(model_dir: Path, tmp_path: Path) -> None:
    """What lies in the cache goes bad: whoever reads it ends with an error, and nobody after him finds it."""
    async with workers(model_dir, tmp_path) as c:
        prompt, tags = prompt_of(5), tags_of("five", 4)
        expected, _ = await answer(c, "req-a", prompt, tags)
        await until_cached(c, tags)
        (block,) = await c.decode.shell.call(lambda b: [found[1] for found in _cached(b, tags)][1:2])
        poison(c.decode.shell, block)
        output, record = await answer(c, "req-b", prompt, tags)
        assert (output, record.finish) == ([], "error")
        await holds_numbers_only(c.decode.shell)
        for turn in range(3):
            output, record = await answer(c, f"req-c{turn}", prompt, tags)
            assert (output, record.finish) == (expected, "length")


async def until_cached(c: Cell, tags: tuple[GroupTags, ...]) -> None:
    for _ in range(int(WAIT_S / 0.05)):
        if len(await c.decode.shell.call(lambda batcher: _cached(batcher, tags))) == len(tags[0].tags):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the prompt was not cached")


def _cached(batcher: Batcher, tags: tuple[GroupTags, ...]) -> list[tuple[BlockTag, int]]:
    """(tag, block id) of those that are in the cache."""
    pool = batcher.pool.groups[0]
    return [(tag, block) for tag in tags[0].tags if (block := pool._by_tag.get(tag)) is not None]


@pytest.mark.parametrize("turn", [0, 1])
async def test_op54_bad_kv_is_not_handed_over(
    model_dir: Path, tmp_path: Path, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a prefill worker no logits tell: it looks at what it names. The decode worker computes the prompt itself."""
    async with workers(model_dir, tmp_path) as c:
        prompt, tags = prompt_of(9), tags_of("nine", 4)
        expected = await c.local(prompt, a=attempt("req-r"), sampling=SHORT)
        spoiled, look, left = list[int](), WorkerEngine.are_finite, turn

        def spoil(core: WorkerEngine, blocks: Sequence[tuple[int, int, int, int]]) -> bool:
            nonlocal left
            if left == 0:
                poison(c.prefill.shell, blocks[0][1])
                spoiled.append(blocks[0][1])
            left -= 1
            return look(core, blocks)

        monkeypatch.setattr(WorkerEngine, "are_finite", spoil)
        output = await handed_off(c, "req-h", prompt, tags)
        assert spoiled
        assert output == expected
        held = c.driver.finals[attempt("req-h").request_id]
        assert held.finish == "length"
        await until(lambda: len(c.prefill.table) == 0, WAIT_S)
        await holds_numbers_only(c.prefill.shell)
        # And nothing of it is in the cache: the same prompt is handed over whole, and right
        assert await handed_off(c, "req-i", prompt, tags) == expected
        totals = c.driver.finals[attempt("req-i").request_id].totals
        assert totals is not None
        assert totals.received_tokens == len(prompt) - 1


async def handed_off(c: Cell, name: str, prompt: list[int], tags: tuple[GroupTags, ...]) -> list[int]:
    reserved = await c.driver.reserve(c.decode_id, prompt, a=attempt(name), prefill=c.prefill_id, sampling=SHORT)
    assert isinstance(reserved, m.Reserved), reserved
    accepted = await c.driver.run(c.prefill_id, c.decode_id, prompt, reserved, a=attempt(name), tags=tags)
    assert isinstance(accepted, m.PrefillAccepted), accepted
    await c.driver.final(name, WAIT_S)
    return c.driver.output(name)
