"""Bitwise equal logits however a request is run, with weights or KV kept in few bits: each kind against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.numerics import numerics_id
from shared.model.decoder import Model, load_decoder
from tests.native import require_native
from tests.pipeline.equivalence import MODES, ORACLE, PAIRWISE, Cell, CellResult, Prompt, make_prompts, run_cell
from tests.pipeline.test_equivalence import TINY_LENGTHS, check_cell
from tests.tiny_models import make_tiny_model

KINDS = [
    *(("bfloat16", "int8", ""), ("float32", "int8", ""), ("bfloat16", "int4", ""), ("float32", "int4-g128", "")),
    *(("bfloat16", "none", "int8"), ("bfloat16", "none", "float16")),
]
"""What is computed in, weights, and KV if that is kept otherwise."""
LONG_KINDS = [("float32", "none", "int8"), ("float32", "none", "float16"), ("bfloat16", "int8", "int8")]
"""The same, of the long run."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _kind(kind: tuple[str, str, str]) -> Any:
    dtype, quant, kv = kind
    name = f"{dtype}-{quant}" + (f"-{kv} KV" if kv else "")
    return pytest.param(kind, id=name, marks=[pytest.mark.long] if kind in LONG_KINDS else [])


@pytest.fixture(scope="module", params=map(_kind, KINDS + LONG_KINDS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, str]:
    """A model, and the dtype of its KV."""
    require_native()
    dtype, quant, kv = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype=getattr(torch, dtype))
    return load_decoder(folder, dtype, "native", threads=2, quant=quant), kv or dtype


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return make_prompts(TINY_LENGTHS, 320, max_tokens=10)


@pytest.fixture(scope="module")
def oracle(tiny: tuple[Model, str], prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> CellResult:
    return run_cell(ORACLE, *tiny, prompts, tmp_path_factory.mktemp("kv"))


@pytest.mark.parametrize("cell", [*PAIRWISE, MODES[0]], ids=str)
def test_tiny(cell: Cell, tiny: tuple[Model, str], prompts: list[Prompt], oracle: CellResult, tmp_path: Path) -> None:
    check_cell(cell, run_cell(cell, *tiny, prompts, tmp_path), oracle, prompts)


def test_few_bits_are_not_the_plain_numbers(
    tiny: tuple[Model, str], prompts: list[Prompt], oracle: CellResult, tmp_path: Path
) -> None:
    # were the setting ignored, every cell above would pass
    model, kv_dtype = tiny
    dtype = str(model.dtype).removeprefix("torch.")
    folder = make_tiny_model(tmp_path / "plain", dtype=getattr(torch, dtype))
    plain = load_decoder(folder, dtype, "native", threads=2)
    other = run_cell(ORACLE, plain, dtype, prompts[:3], tmp_path)
    assert all(oracle.rows[key] != digest for key, digest in other.rows.items())
    assert numerics_id(dtype, plain.kernels, plain.quant) != numerics_id(dtype, model.kernels, model.quant, kv_dtype)
