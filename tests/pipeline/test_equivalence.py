"""Bitwise equal logits however a request is run. See docs/equivalence.md."""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kernels.native.cpu import VARIABLE
from shared.engine.numerics import numerics_id
from shared.model.decoder import Model, load_decoder
from shared.model.digest import model_digest
from tests.native import ALL_LEVELS, require_native
from tests.pipeline import equivalence
from tests.pipeline.equivalence import (
    ALL,
    BATCH_SIZE,
    MODES,
    ORACLE,
    PAIRWISE,
    Cell,
    CellResult,
    Prompt,
    differences,
    make_prompts,
    run_cell,
    run_engine,
    sampled_rows,
    with_predictions,
)
from tests.tiny_models import make_tiny_model

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "equivalence"
# around every boundary there is: blocks of 32, tiles of 64, splits and chunks of 512
TINY_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 129, 200, 385, 514)
MODEL_LENGTHS = (1, 33, 64, 97, 128, 160, 17, 200)
FEW_LENGTHS = (1, 33, 64, 97)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_cell(cell: Cell, result: CellResult, oracle: CellResult, prompts: list[Prompt]) -> None:
    assert differences(result, oracle) == []
    assert sampled_rows(prompts) <= result.rows.keys()
    # the cell must really have been what it says
    whole = sum(len(p.token_ids) + p.sampling.max_tokens - 1 for p in prompts)
    needed = result.computed_tokens - result.wasted_tokens
    assert needed + result.cached_tokens + result.received_tokens == whole
    expected_cached = sum((len(p.token_ids) - 1) // 32 * 32 for p in prompts) if cell.cache == "warm" else 0
    assert result.cached_tokens == expected_cached
    assert (result.received_tokens > 0) == (cell.path == "handed_off")
    assert (result.widest_step > 1) == (cell.company == "batched")
    if cell.mode == "preempted":
        assert result.preemptions >= len(prompts)
        assert result.wasted_tokens > 0
    elif cell.mode == "speculated":
        assert 0 < result.right < result.guesses
        assert result.wasted_tokens == result.guesses - result.right
    else:
        assert result.preemptions == result.wasted_tokens == result.guesses == 0
    if cell.mode in ("static", "dynamic"):
        assert result.widest_step <= BATCH_SIZE


def prompts_of(cell: Cell, prompts: list[Prompt], oracle: CellResult, model: Model) -> list[Prompt]:
    """What a cell is given."""
    if cell.mode != "speculated":
        return prompts
    return with_predictions(prompts, oracle.tokens, model.config.vocab_size)


# ------------------------------------------------------------------------------------------ tiny model, every cell


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float32-native", "bfloat16-native"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, str]:
    dtype, _, kernels = str(request.param).partition("-")
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype=getattr(torch, dtype))
    return load(folder, dtype, kernels), dtype


def load(folder: Path, dtype: str, kernels: str) -> Model:
    """Native models compute on two threads: which of them makes a row must not show either.

    Args:
        kernels: "", "native", or "native-" and a level of instructions.
    """
    kernels, _, level = kernels.partition("-")
    if kernels:
        require_native()
    if level and level not in ALL_LEVELS:
        pytest.skip(f"the processor has no {level}")
    with patch.dict(os.environ, {VARIABLE: level} if level else {}):
        model = load_decoder(folder, dtype, kernels or "torch", threads=2)
    assert f"-{level}-" in model.kernels.build or not level
    return model


@pytest.fixture(scope="module")
def tiny_prompts() -> list[Prompt]:
    return make_prompts(TINY_LENGTHS, 320, max_tokens=10)


@pytest.fixture(scope="module")
def tiny_oracle(
    tiny: tuple[Model, str], tiny_prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> CellResult:
    return run_cell(ORACLE, *tiny, tiny_prompts, tmp_path_factory.mktemp("kv"))


@pytest.mark.parametrize("cell", [ORACLE, *PAIRWISE, *MODES], ids=str)
def test_tiny(
    cell: Cell, tiny: tuple[Model, str], tiny_prompts: list[Prompt], tiny_oracle: CellResult, tmp_path: Path
) -> None:
    result = run_cell(cell, *tiny, prompts_of(cell, tiny_prompts, tiny_oracle, tiny[0]), tmp_path)
    check_cell(cell, result, tiny_oracle, tiny_prompts)
    assert (result.rows_again > 0) == (cell.mode == "preempted")


@pytest.mark.parametrize("cell", [cell for cell in ALL if cell not in (ORACLE, *PAIRWISE)], ids=str)
@pytest.mark.parametrize(
    "tiny",
    [
        "float32",
        "bfloat16-native",
        pytest.param("bfloat16", marks=pytest.mark.long),
        pytest.param("float32-native", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_tiny_in_every_other_cell(
    cell: Cell, tiny: tuple[Model, str], tiny_prompts: list[Prompt], tiny_oracle: CellResult, tmp_path: Path
) -> None:
    """What three columns make of one another lies in the batcher and the pool: one dtype of each kernels shows it."""
    check_cell(cell, run_cell(cell, *tiny, tiny_prompts, tmp_path), tiny_oracle, tiny_prompts)


def test_rows_are_equal_exactly_where_the_text_is(tiny_prompts: list[Prompt], tiny_oracle: CellResult) -> None:
    # were the digests blind to a difference, this would show it
    prefixes: dict[bytes, set[tuple[int, ...]]] = {}
    for (i, position), digest in tiny_oracle.rows.items():
        text = (*tiny_prompts[i].token_ids, *tiny_oracle.tokens[i])[: position + 1]
        prefixes.setdefault(digest, set()).add(text)
    assert all(len(texts) == 1 for texts in prefixes.values())
    assert len({text for texts in prefixes.values() for text in texts}) == len(prefixes)


@pytest.mark.parametrize("cell", [PAIRWISE[0], PAIRWISE[1]], ids=str)
def test_a_resumed_sequence_goes_on_with_the_same_bits(
    cell: Cell, tiny: tuple[Model, str], tiny_prompts: list[Prompt], tiny_oracle: CellResult, tmp_path: Path
) -> None:
    committed = {i: tokens[: 1 + i % 9] for i, tokens in tiny_oracle.tokens.items()}
    resumed = [replace(prompt, committed=tuple(committed[i])) for i, prompt in enumerate(tiny_prompts)]
    result = run_cell(cell, *tiny, resumed, tmp_path)
    assert {i: committed[i] + tokens for i, tokens in result.tokens.items()} == tiny_oracle.tokens
    assert [i for i in result.rows if result.rows[i] != tiny_oracle.rows[i]] == []


def test_the_threads_give_the_oracle_s_tokens(
    tiny: tuple[Model, str], tiny_prompts: list[Prompt], tiny_oracle: CellResult, tmp_path: Path
) -> None:
    predicted = with_predictions(tiny_prompts, tiny_oracle.tokens, 320)
    for prompts, mode in ((tiny_prompts, "continuous"), (predicted, "speculated")):
        assert run_engine(*tiny, prompts, tmp_path, mode) == tiny_oracle.tokens


def test_one_flipped_bit_of_kv_is_seen_and_stays_in_its_sequence(
    tiny: tuple[Model, str],
    tiny_prompts: list[Prompt],
    tiny_oracle: CellResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # mutation: one bit of one key of prompt 8 flips after it was handed over
    sound = equivalence.hand_off

    def flip(cell: Cell, prompts: Any, prefill: Any, decode: Any, targets: Any) -> None:
        sound(cell, prompts, prefill, decode, targets)
        span = decode.pool.span(0, targets[8].block_ids[0])
        span[2 if tiny[1] == "float32" else 0] ^= 0x40  # the highest bit of the mantissa

    monkeypatch.setattr(equivalence, "hand_off", flip)
    result = run_cell(Cell("batched", "cold", 512, "handed_off", 0), *tiny, tiny_prompts, tmp_path)
    assert differences(result, tiny_oracle) != []
    assert {key[0] for key, digest in result.rows.items() if tiny_oracle.rows.get(key) != digest} == {8}


def test_pairwise_covers_every_pair() -> None:
    def pairs(cells: tuple[Cell, ...]) -> set[tuple[object, ...]]:
        values = [(c.company, c.cache, c.chunk, c.path, c.depth) for c in cells]
        return {(i, v[i], j, v[j]) for v in values for i, j in itertools.combinations(range(5), 2)}

    assert pairs((ORACLE, *PAIRWISE)) == pairs(ALL)


# ------------------------------------------------------------------------------------------ default model


@pytest.mark.parametrize(
    "kind",
    [
        "bfloat16-native-avx2",
        pytest.param("float32-native-avx2", marks=pytest.mark.long),
        pytest.param("bfloat16-native-avx512", marks=pytest.mark.long),
    ],
)
def test_tiny_on_lower_levels(kind: str, tiny_prompts: list[Prompt], tmp_path: Path) -> None:
    """Some cells with what an older processor would load."""
    dtype, _, kernels = kind.partition("-")
    model = load(make_tiny_model(tmp_path / "tiny", dtype=getattr(torch, dtype)), dtype, kernels)
    oracle = run_cell(ORACLE, model, dtype, tiny_prompts, tmp_path)
    for cell in (*PAIRWISE[:2], MODES[0]):
        check_cell(cell, run_cell(cell, model, dtype, tiny_prompts, tmp_path), oracle, tiny_prompts)


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("float32", marks=pytest.mark.long),
        pytest.param("bfloat16", marks=pytest.mark.long),
        pytest.param("float32-native", marks=pytest.mark.long),
        "bfloat16-native",
    ],
)
def test_default_model_pairwise(kind: str, default_model_dir: Path, tmp_path: Path) -> None:
    dtype, _, kernels = kind.partition("-")
    model = load(default_model_dir, dtype, kernels)
    # plain torch takes four times as long; in 16 tokens half of the sequences still begin a new block
    prompts = make_prompts(MODEL_LENGTHS, model.config.vocab_size, max_tokens=32 if kernels else 16)
    oracle = run_cell(ORACLE, model, dtype, prompts, tmp_path, every_row=False)
    for cell in (*PAIRWISE, MODES[0], MODES[-1]):
        given = prompts_of(cell, prompts, oracle, model)
        result = run_cell(cell, model, dtype, given, tmp_path, every_row=False)
        check_cell(cell, result, oracle, prompts)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_default_model_in_plain_torch(default_model_dir: Path, tmp_path: Path) -> None:
    """Every value of every column at least once, with few prompts; the tiny model runs in every cell."""
    model = load(default_model_dir, "float32", "")
    prompts = make_prompts(FEW_LENGTHS, model.config.vocab_size, max_tokens=8)
    oracle = run_cell(ORACLE, model, "float32", prompts, tmp_path, every_row=False)
    for cell in (PAIRWISE[6], PAIRWISE[1], MODES[0]):
        check_cell(cell, run_cell(cell, model, "float32", prompts, tmp_path, every_row=False), oracle, prompts)


KINDS = ["float32", "bfloat16", "bfloat16-native", "float32-native"]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", KINDS)
def test_default_model_every_cell(kind: str, default_model_dir: Path, tmp_path: Path) -> None:
    """50 prompts x 64 tokens in every cell; about an hour on one core. Writes what docs/equivalence.md shows."""
    # the covering subset first: a run cut short has then seen every pair
    cells = tuple(dict.fromkeys((*PAIRWISE, *ALL)))
    report_matrix(default_model_dir, kind, kind, 50, 64, cells, tmp_path, RESULTS)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", KINDS)
def test_default_model_every_mode(kind: str, default_model_dir: Path, tmp_path: Path) -> None:
    """The same workload preempted, and in static and dynamic batches."""
    report_matrix(default_model_dir, kind, f"{kind}-modes", 50, 64, MODES, tmp_path, RESULTS)


def report_matrix(
    folder: Path, kind: str, name: str, count: int, max_tokens: int, cells: tuple[Cell, ...], pools: Path, out: Path
) -> None:
    """Run `cells` on a model folder, write `<name>.json` and `<name>.txt` under `out`; fails if a bit differs.

    Args:
        kind: a dtype, with `-native` behind it for the native kernels.
    """
    dtype, _, kernels = kind.partition("-")
    model = load(folder, dtype, kernels)
    head: dict[str, object] = {
        "model": folder.name,
        "model_digest": model_digest(folder),
        "numerics": numerics_id(dtype, model.kernels),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "prompts": count,
        "tokens_each": max_tokens,
        "cells_planned": len({ORACLE, *cells}),
    }
    lengths = [1 + (i * 37) % 250 for i in range(count)]
    prompts = make_prompts(lengths, model.config.vocab_size, max_tokens)
    oracle: CellResult | None = None
    records: list[dict[str, object]] = []
    for cell in (ORACLE, *(c for c in cells if c != ORACLE)):
        started = time.perf_counter()
        given = prompts_of(cell, prompts, oracle, model) if oracle is not None else prompts
        result = run_cell(cell, model, dtype, given, pools, every_row=False)
        oracle = oracle or result
        records.append(
            {
                "cell": str(cell),
                "rows_compared": len(result.rows),
                "differences": differences(result, oracle),
                "tokens": sum(len(tokens) for tokens in result.tokens.values()),
                "computed_tokens": result.computed_tokens,
                "cached_tokens": result.cached_tokens,
                "received_tokens": result.received_tokens,
                "wasted_tokens": result.wasted_tokens,
                "preemptions": result.preemptions,
                "rows_again": result.rows_again,
                "steps": result.steps,
                "widest_step": result.widest_step,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
        # after each cell and before it is judged: a run cut short, or a failing one, leaves what it found
        write_report(out, name, head, records)
        check_cell(cell, result, oracle, prompts)


def write_report(out: Path, name: str, head: dict[str, object], records: list[dict[str, object]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(head | {"cells": records}, indent=1) + "\n", encoding="utf-8")
    lines = [
        "{model}, {prompts} prompts x {tokens_each} tokens, {numerics}".format(**head),
        *(
            f"{r['cell']:32} {r['rows_compared']:>6} rows  {'DIFFERENT' if r['differences'] else 'equal'}"
            for r in records
        ),
        f"{len(records)} of {head['cells_planned']} cells run",
    ]
    (out / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
