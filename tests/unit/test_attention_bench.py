"""The attention bench's figures: what is read, what is multiplied, what sharing gains."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.attention import CELLS, PREFIX, PRODUCT, READ_BYTES, Heads, _parser, figures, heads_of, text_of
from loadtest.samples import Sample, Series
from shared.contracts.errors import SettingsError
from tests.tiny_models import make_tiny_model

HEADS = Heads(layers=2, q_heads=4, kv_heads=2, head_dim=8)


def series(seconds: float, foreign_cores: float = 0.0) -> Series:
    return Series([Sample(seconds, foreign_cores)] * 3)


def measured() -> dict[str, Series]:
    """Every cell takes a second, the shared one half of it; memory is read at 1 GB/s, products run at 1 GF/s."""
    rows, inner, outer = PRODUCT
    found = {cell.name: series(0.5 if cell.shared else 1.0) for cell in CELLS}
    return found | {"read": series(READ_BYTES / 1e9), "product": series(2 * rows * inner * outer / 1e9)}


def test_tables_share_whole_blocks_and_nothing_else() -> None:
    for cell in CELLS:
        tables = cell.tables()
        common = cell.shared // 32
        assert all(len(table) == cell.blocks == len(set(table)) for table in tables)
        assert all(a[:common] == b[:common] and not {*a[common:]} & {*b} for a, b in pairwise(tables))


def test_what_is_read_and_multiplied() -> None:
    found = figures(measured(), {cell.name: 1000 for cell in CELLS}, HEADS, 2 * 2 * 2 * 8 * 2)
    assert (found["read_gb_s"], found["product_gf_s"]) == (pytest.approx(1), pytest.approx(1))
    assert found["shared_attention"] == pytest.approx(2)
    assert "shared_step" not in found
    by_name = {row["cell"]: row for row in found["cells"]}
    row = by_name["decode B8 at 1024"]
    assert row["of_read"] == pytest.approx(1000 * 2 * 2 * 2 * 8 * 2 / 1e9)
    assert row["of_product"] == pytest.approx(8 * 1025 * 4 * 2 * 4 * 8 / 1e9)
    assert by_name["prefill 512 at 0"]["gf_s"] == pytest.approx(512 * 513 / 2 * 4 * 2 * 4 * 8 / 1e9)


def test_heads_are_those_told_or_the_model_s(tmp_path: Path) -> None:
    def told(*argv: str) -> argparse.Namespace:
        return _parser().parse_args(argv)

    folder = str(make_tiny_model(tmp_path))
    assert heads_of(told()) == Heads(24, 14, 2, 64)
    assert heads_of(told("--model", folder)) == Heads(4, 4, 2, 16)
    assert heads_of(told("--model", folder, "--heads", "3", "8", "4", "32")) == Heads(3, 8, 4, 32)
    with pytest.raises(SettingsError, match=r"config\.json"):
        heads_of(told("--model", str(tmp_path / "none")))


def test_the_table_marks_a_busy_machine_and_names_whole_steps() -> None:
    head: dict[str, Any] = {
        "heads": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8},
        "dtype": "bfloat16",
        "heads_of": "m",
        "kv": "int8",
    }
    head |= {"threads": 2, "machine": {"cpu": "x", "date": "today"}, "model": "m", "quant": "int8"}
    found = measured() | {"step": series(0.9), "step, shared": series(0.6)}
    keys = {cell.name: 1000 for cell in CELLS}
    text = text_of(head | {"figures": figures(found, keys, HEADS, 2 * 2 * 2 * 8 * 2)})
    assert "BUSY" not in text
    assert text.startswith("attention, heads of m, 2 layers of 4 heads over 2 of 8, bfloat16, KV in int8, 2 threads")
    assert text_of({**head, "heads_of": None, "figures": figures(found, keys, HEADS, 1)}).startswith(
        "attention, 2 layers"
    )
    assert "quant int8: 900.0 and 600.0 ms, 1.50" in text
    found[f"decode B32 at {PREFIX}"] = series(1.0, 1.0)
    lines = text_of(head | {"figures": figures(found, keys, HEADS, 2 * 2 * 2 * 8 * 2)}).splitlines()
    assert [line for line in lines if "BUSY" in line] == [line for line in lines if f"B32 at {PREFIX} " in line]
    assert "no measure of this machine" in lines[-1]
