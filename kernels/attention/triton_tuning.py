"""Shapes the attention kernels are compiled in. None of them enters a result: see README.md.

Chosen on an H200 and by what the compiled kernels take (`python -m kernels.aot`): no kernel may spill registers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import torch

from kernels.attention.triton_plan import NARROW, WIDE
from kernels.chip import capability, interpreted, multiprocessors, pretend, shared_bytes

HEAD_DIMS = (64, 80, 96, 128, 256)
_MOST_STAGES = 3
MOST_STAGES = 6
_INTERPRETED_PROGRAMS = 8
_forced: list[Shape] = []


class TuningError(ValueError):
    """A table of shapes that cannot be used."""


class TunedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `tuning_sm*.json`: fields of a `Shape`, and what it is for."""

    head_dim: int
    quantized: bool
    split_warps: int
    wide_rows: int
    wide_warps: int
    split_stages: int
    wide_stages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How a head_dim is computed. A warp has 16 whole rows of scores in both kernels, or half of 16 in both: sums over
    keys then run in one order."""

    split_warps: int
    wide_rows: int  # query rows of an item of prefill; 0: prefill too goes by splits
    wide_warps: int
    split_stages: int = 0  # key tiles in flight; 0: as many as help
    wide_stages: int = 0


def padded(head_dim: int) -> int:
    """The power of two a row of `head_dim` is held in."""
    return 1 << (head_dim - 1).bit_length()


def shape(head_dim: int, quantized: bool, device: torch.device) -> Shape:
    """What `tuning_sm*.json` beside this file says of the chip, or the default.

    Raises:
        TuningError: the file is not one that `read_table` takes.
    """
    if _forced:
        return _forced[-1]
    found = _table(capability(device)).get((head_dim, quantized))
    return default_shape(head_dim, quantized, device) if found is None else found


def default_shape(head_dim: int, quantized: bool, device: torch.device) -> Shape:
    """Two accumulators of a wide item must fit the registers beside all else."""
    width = padded(head_dim)
    if width > 128:
        return Shape(8, 0, 0)
    if width > 64 and capability(device)[0] < 9:
        return Shape(8, 0, 0) if quantized else Shape(8, NARROW, 8)
    if width > 64 and quantized:
        return Shape(4, 0, 0)
    return Shape(4, WIDE, 8)


def stages(head_dim: int, rows: int, q_bytes: int, kv_bytes: int, device: torch.device, wanted: int = 0) -> int:
    """Key tiles in flight, as many as help and fit beside the query rows.

    Args:
        q_bytes, kv_bytes: of an element of the query and of the pool. Tiles of 8 bits are small: one more is asked for
            where two programs then still share a multiprocessor.
        wanted: as many as fit up to this; 0: as many as help.
    """
    tile, beside = 2 * 64 * padded(head_dim) * kv_bytes, rows * padded(head_dim) * q_bytes
    if kv_bytes == 1:
        beside += 64 * padded(head_dim) * 2  # values as floats
        if not wanted and (_MOST_STAGES + 1) * tile + beside <= shared_bytes(device) // 2:
            return _MOST_STAGES + 1
    return max(1, min(wanted or _MOST_STAGES, (shared_bytes(device) - beside) // tile))


def join_shape(num_q_heads: int, most_splits: int, device: torch.device) -> tuple[int, int, int]:
    """Query heads of a program that joins splits, the splits it reads at a time where there are many, and its warps.

    A program waits for memory once for all it reads at a time: of a long sequence alone nothing else would run.
    """
    if interpreted(device):
        return padded(num_q_heads), 2, 1
    return 1, 32 if most_splits > 64 else 8 if most_splits > 4 else 4, 1


def programs(device: torch.device) -> int:
    """Items computed at a time."""
    return 2 * multiprocessors(device) if device.type == "cuda" else _INTERPRETED_PROGRAMS


def candidates(head_dim: int, quantized: bool, device: torch.device) -> Iterator[Shape]:
    """All shapes that give the default's bits: a warp keeps as much of its rows. The default comes first.

    Decode's depth and prefill's have nothing to do with each other: any of the one may stand with any of the other.
    """
    usual = default_shape(head_dim, quantized, device)
    yield usual
    width, kv_bytes = padded(head_dim), 1 if quantized else 2
    wide = [(0, 0)] if not usual.wide_rows else [(NARROW, usual.split_warps), (WIDE, 2 * usual.split_warps)]
    for wide_rows, wide_warps in wide:
        for depth in range(MOST_STAGES + 1):
            tiles = max(1, depth) * 2 * 64 * width * kv_bytes + (64 * width * 2 if quantized else 0)
            found = Shape(usual.split_warps, wide_rows, wide_warps, depth, depth if wide_rows else 0)
            if found != usual and tiles + (wide_rows or NARROW) * width * 2 <= shared_bytes(device):
                yield found


def read_table(file: Path, chip: tuple[int, int]) -> dict[tuple[int, bool], Shape]:
    """Shapes by head_dim and whether the pool is of 8 bits.

    Raises:
        TuningError: the file cannot be read, an entry has other fields, or decodes or prefills as none of its
            `candidates`; the message names file and entry.
    """
    try:
        entries = msgspec.json.decode(file.read_bytes(), type=list[TunedShape])
    except (OSError, msgspec.MsgspecError) as exc:
        raise TuningError(f"{file.name}: {exc}") from exc
    table: dict[tuple[int, bool], Shape] = {}
    for place, entry in enumerate(entries):
        key = entry.head_dim, entry.quantized
        if entry.head_dim not in HEAD_DIMS or key in table:
            raise TuningError(f"{file.name}: entry {place} has head_dim {entry.head_dim}, not one of its own")
        with pretend(chip):
            allowed = [*candidates(*key, torch.device("cpu"))]
        table[key] = Shape(**{field.name: getattr(entry, field.name) for field in fields(Shape)})
        if not all(half(table[key]) in map(half, allowed) for half in (decoded, prefilled)):
            raise TuningError(
                f"{file.name}: entry {place}, {table[key]}, could change results or does not fit the chip"
            )
    return table


def decoded(shape: Shape) -> tuple[int, ...]:
    """What decode uses of a shape."""
    return shape.split_warps, shape.split_stages


def prefilled(shape: Shape) -> tuple[int, ...]:
    """What prefill uses of a shape, beside `decoded` where it too goes by splits."""
    return shape.wide_rows, shape.wide_warps, shape.wide_stages


def require_table(device: torch.device) -> None:
    """Raise `TuningError` where the chip has a table that cannot be used."""
    _table(capability(device))


@functools.cache
def _table(chip: tuple[int, int]) -> dict[tuple[int, bool], Shape]:
    file = Path(__file__).with_name(f"tuning_sm{chip[0]}{chip[1]}.json")
    return read_table(file, chip) if file.exists() else {}


@contextmanager
def forced(tried: Shape) -> Iterator[None]:
    """Use one shape for all: for measuring it."""
    _forced.append(tried)
    try:
        yield
    finally:
        _forced.pop()
