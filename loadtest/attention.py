"""`python -m loadtest.attention`: the native kernels' attention over a pool, beside what memory and products reach.

Decode and prefill of one model's heads, all its layers in one call; the same decode with a prefix whose blocks all
sequences share. With `--model` the heads are that model's unless others are told, and whole decode steps of it are
measured too, shared and not. Time is of attention alone: how fast it reads its keys and values, and how fast it
multiplies, stand beside a plain read of memory and a matrix product of the same kernels, measured in turn with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.linear.quantize import QUANTS
from kernels.native.abi import TO_ELEMENTS
from kernels.native.arena import Arena
from kernels.native.compiler import NativeUnavailable
from kernels.native.library import Team, open_library
from kernels.native.model import GroupPlan, NativeLayer, NativeModel, Shape, StepArrays
from kernels.native.packed import PackedLinear, linear, pack_linear, packed_bytes
from kernels.tile_layouts import LANES16
from loadtest.machine import IDLE_CORES, this_machine
from loadtest.samples import Series, collect
from shared.contracts.errors import BatonError
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.model_runner import ModelRunner
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.kv.layout import FLOAT16, INT8, LayerGroup, PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.model.config import layer_groups, load_config
from shared.model.decoder import load_decoder
from shared.model.fetch import cache_dir

BLOCK, ENOUGH = 32, 5
READ_BYTES = 1 << 28
PRODUCT = (512, 896, 4864)
"""Rows, inputs and outputs of the matrix product that stands for what products reach."""
PREFIX = 1500
DEFAULT_HEADS = (24, 14, 2, 64)
"""Qwen2.5-0.5B's."""


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Cell:
    """`sequences` with `context` tokens before the `tokens` computed; the first `shared` of it in shared blocks."""

    name: str
    sequences: int
    context: int
    tokens: int = 1
    shared: int = 0

    @property
    def blocks(self) -> int:
        """Of a sequence."""
        return -(-(self.context + self.tokens) // BLOCK)

    def tables(self) -> list[list[int]]:
        """Block tables over blocks from 0; shared are only whole blocks."""
        common = self.shared // BLOCK
        own = self.blocks - common
        return [[*range(common), *range(common + i * own, common + (i + 1) * own)] for i in range(self.sequences)]

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key it sees."""
        return self.sequences * sum(range(self.context + 1, self.context + self.tokens + 1))


CELLS = (
    Cell("decode B1 at 4096", 1, 4096),
    Cell("decode B8 at 1024", 8, 1024),
    Cell("decode B8 at 4096", 8, 4096),
    Cell("decode B32 at 1024", 32, 1024),
    Cell(f"decode B32 at {PREFIX}", 32, PREFIX),
    Cell(f"decode B32 at {PREFIX}, shared", 32, PREFIX, shared=PREFIX),
    Cell("prefill 512 at 0", 1, 0, 512),
    Cell("prefill 256 at 1792", 1, 1792, 256),
    Cell("prefill 512 at 1536", 1, 1536, 512),
    Cell("prefill 512 at 7680", 1, 7680, 512),
)


class Attention:
    """A model of which only attention is used, over a pool in memory."""

    def __init__(self, team: Team, heads: Heads, dtype: torch.dtype, pool: Pool) -> None:
        self.heads, self.dtype = heads, dtype
        self._pool = pool.views()[0]
        most = max(cell.context + cell.tokens for cell in CELLS)
        q, kv = heads.q_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        shape = Shape(8, 16, 8, heads.q_heads, heads.kv_heads, heads.head_dim, 1e-5, heads.head_dim**-0.5)
        sizes = ((q + 2 * kv, 8), (8, q), (8, 16))
        qkv, o, down = (_zeros(team, dtype, *size) for size in sizes)
        gate_up, one = _zeros(team, dtype, 32, 8, gated=True), torch.ones(8)
        layers = [NativeLayer(one, one, qkv, o, gate_up, down, 0, i) for i in range(heads.layers)]
        table = torch.zeros(most, 2, heads.head_dim)
        self._model = NativeModel(team, dtype, shape, torch.zeros(8, 8), table, layers, one, None)

    def step(self, cell: Cell) -> Callable[[], None]:
        """One call of all layers."""
        plan, q = self._plan(cell), torch.randn(cell.sequences * cell.tokens, self.heads.q_heads, self.heads.head_dim)
        q = q if self._pool.dtype == torch.float16 else q.to(self.dtype)
        return lambda: (None, self._model.attention(q, plan, range(self.heads.layers)))[0]

    def keys_read(self, cell: Cell) -> int:
        """Keys of a head that a layer reads, shared ones once."""
        return self._model.keys_read(self._plan(cell))

    def _plan(self, cell: Cell) -> StepArrays:
        rows = cell.sequences * cell.tokens
        positions = torch.arange(cell.context, cell.context + cell.tokens).repeat(cell.sequences)
        none = torch.empty(0, dtype=torch.int64)
        return StepArrays(
            self._model, torch.zeros(rows, dtype=torch.int64), positions, range(0, rows + 1, cell.tokens),
            [cell.context + cell.tokens] * cell.sequences, none, [GroupPlan(cell.tables(), [-1] * rows)], [self._pool],
            torch.empty(0, 8),
        )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        report = run(options)
    except (BatonError, NativeUnavailable) as exc:
        print(f"attention bench: {exc.message if isinstance(exc, BatonError) else exc}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every cell in turn, round after round."""
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    heads, dtype = heads_of(options), getattr(torch, options.dtype)
    team = Team(open_library(cache_dir(os.environ) / "kernels"), threads)
    with ExitStack() as stack:
        kept = options.kv or options.dtype
        group = LayerGroup("full", tuple(range(heads.layers)), heads.kv_heads, heads.head_dim, BLOCK, kept, LANES16)
        attention = Attention(team, heads, dtype, _pool(group, max(map(_blocks, CELLS)), stack))
        steps = {cell.name: attention.step(cell) for cell in CELLS}
        steps |= {"read": _read(), "product": _product(team, dtype)}
        if options.model:
            steps |= _whole_steps(options, threads, stack)
        series = collect(steps, options.seconds, ENOUGH)
        keys = {cell.name: attention.keys_read(cell) for cell in CELLS}
    return {
        "bench": "attention",
        "heads": asdict(heads),
        "heads_of": options.model.name if options.model and heads == model_heads(options.model) else None,
        "dtype": options.dtype,
        "model": options.model.name if options.model else None,
        "quant": options.quant,
        "threads": threads,
        "machine": this_machine().body(),
        "kv": kept,
        "figures": figures(series, keys, heads, group.token_bytes),
        "samples": {name: [asdict(sample) for sample in one.samples] for name, one in series.items()},
    }


def heads_of(options: argparse.Namespace) -> Heads:
    """Those that are told, else the model's, else the default. Raises SettingsError where a model folder has none."""
    if options.heads or not options.model:
        return Heads(*(options.heads or DEFAULT_HEADS))
    return model_heads(options.model)


def model_heads(folder: Path) -> Heads:
    """Of a model folder. Raises SettingsError where it has no configuration we read."""
    config = load_config(folder)
    return Heads(config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim)


def figures(series: dict[str, Series], keys: dict[str, int], heads: Heads, token_bytes: int) -> dict[str, Any]:
    """Of every cell its milliseconds, what it reads and multiplies in a second, and what sharing gains. Pure.

    Args:
        keys: of a head that a layer reads, by cell.
        token_bytes: of one token's keys and values in all layers.
    """
    rows, inner, outer = PRODUCT
    read_gb_s = READ_BYTES / series["read"].step_s / 1e9
    product_gf_s = 2 * rows * inner * outer / series["product"].step_s / 1e9
    cells = []
    for cell in CELLS:
        one = series[cell.name]
        size = keys[cell.name] * token_bytes
        flops = 4 * cell.pairs * heads.layers * heads.q_heads * heads.head_dim
        gb_s, gf_s = size / one.step_s / 1e9, flops / one.step_s / 1e9
        cells.append({
            "cell": cell.name, "ms": one.step_s * 1e3, "gb_s": gb_s, "gf_s": gf_s, "of_read": gb_s / read_gb_s,
            "of_product": gf_s / product_gf_s, "idle": one.idle, "clean": len(one.clean), "samples": len(one.samples),
        })  # fmt: skip
    ms = {name: one.step_s * 1e3 for name, one in series.items()}
    plain = f"decode B32 at {PREFIX}"
    found: dict[str, Any] = {"read_gb_s": read_gb_s, "product_gf_s": product_gf_s, "cells": cells}
    found["shared_attention"] = ms[plain] / ms[f"{plain}, shared"]
    if "step" in ms:
        found |= {"step_ms": ms["step"], "shared_step_ms": ms["step, shared"]}
        found["shared_step"] = ms["step"] / ms["step, shared"]
    found["idle"] = all(one.idle for one in series.values())
    return found


def text_of(report: dict[str, Any]) -> str:
    """The table. Pure."""
    found, heads, machine = report["figures"], report["heads"], report["machine"]
    shape = f"{heads['layers']} layers of {heads['q_heads']} heads over {heads['kv_heads']} of {heads['head_dim']}"
    of = f"heads of {report['heads_of']}, " if report["heads_of"] else ""
    kept = f"{report['dtype']}, KV in {report['kv']}" if report["kv"] != report["dtype"] else report["dtype"]
    lines = [
        f"attention, {of}{shape}, {kept}, {report['threads']} threads; {machine['cpu']}, {machine['date']}",
        f"{'':28}{'ms':>9}{'GB/s':>8}{'of read':>9}{'GF/s':>8}{'of product':>12}  samples",
    ]
    for row in found["cells"]:
        busy = "" if row["idle"] else "  BUSY MACHINE"
        figures_ = f"{row['ms']:9.2f}{row['gb_s']:8.1f}{row['of_read']:9.2f}{row['gf_s']:8.0f}{row['of_product']:12.2f}"
        lines.append(f"{row['cell']:28}{figures_}  {row['clean']} of {row['samples']} clean{busy}")
    lines.append(
        f"a plain read of memory {found['read_gb_s']:.1f} GB/s, a matrix product {found['product_gf_s']:.0f} GF/s"
    )
    lines.append(f"a shared prefix of {PREFIX}: attention of B32 {found['shared_attention']:.2f} times as fast")
    if "shared_step" in found:
        steps = f"{found['step_ms']:.1f} and {found['shared_step_ms']:.1f} ms"
        lines.append(f"whole steps of {report['model']}, quant {report['quant']}: {steps}, {found['shared_step']:.2f}")
    if not found["idle"]:
        lines.append(f"Others used more than {IDLE_CORES:g} cores: these figures are no measure of this machine.")
    return "\n".join(lines)


def _whole_steps(options: argparse.Namespace, threads: int, stack: ExitStack) -> dict[str, Callable[[], None]]:
    """Decode steps of a model, B32 after a prefix of its own and after a shared one."""
    model = load_decoder(options.model, options.dtype, "native", threads=threads, quant=options.quant)
    kept = options.kv or options.dtype
    (group,) = layer_groups(model.config, BLOCK, kept, tile_layout=model.kernels.tile_layout)
    cells = [cell for cell in CELLS if cell.context == PREFIX]
    runner = ModelRunner(model, _pool(group, max(map(_blocks, cells)), stack))
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    steps: dict[str, Callable[[], None]] = {}
    for cell in cells:
        rows = [
            ScheduledSequence(f"s{i}", cell.context, (i + 1,), (tuple(table),), 1, greedy)
            for i, table in enumerate(cell.tables())
        ]
        steps["step, shared" if cell.shared else "step"] = partial(_run, runner, StepPlan(1, tuple(rows)))
    return steps


def _run(runner: ModelRunner, plan: StepPlan) -> None:
    torch.set_num_threads(1)
    runner.run(plan)


def _blocks(cell: Cell) -> int:
    return 1 + max(block for table in cell.tables() for block in table)


def _pool(group: LayerGroup, blocks: int, stack: ExitStack) -> Pool:
    """A pool of random keys and values; of integers, bytes that are read as such, scales among them."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=base))
    pool = stack.enter_context(create_pool(Path(folder), WorkerId("bench"), PoolLayout((group,), (blocks,))))
    generator, view = torch.Generator().manual_seed(0), pool.views()[0]
    if group.dtype == INT8:
        first = torch.randint(0, 256, (group.span_bytes,), dtype=torch.uint8, generator=generator)
        first[group.tiles_bytes :].view(torch.float32).uniform_(1e-3, 1e-2, generator=generator)
        for block in range(blocks):
            pool.span(0, block)[:] = first.numpy().tobytes()
        return pool
    view[0].normal_(generator=generator)
    view[1:] = view[0]
    return pool


def _read() -> Callable[[], None]:
    memory = torch.zeros(READ_BYTES // 4)
    return lambda: (None, memory.sum())[0]


def _product(team: Team, dtype: torch.dtype) -> Callable[[], None]:
    rows, inner, outer = PRODUCT
    weight, x = _zeros(team, dtype, outer, inner), torch.zeros(rows, inner, dtype=dtype)
    y = torch.empty(rows, outer, dtype=dtype)
    return lambda: linear(team, x, weight, TO_ELEMENTS, y)


def _zeros(team: Team, dtype: torch.dtype, out: int, inner: int, gated: bool = False) -> PackedLinear:
    parts = [torch.zeros(out // 2, inner, dtype=dtype)] * 2 if gated else [torch.zeros(out, inner, dtype=dtype)]
    return pack_linear(team, Arena(packed_bytes(out, inner, dtype, gated)), parts, [], dtype, gated)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.attention", description="Measure native attention.")
    sizes = "layers, query heads, KV heads, head size (default: the model's, else Qwen2.5-0.5B's)"
    parser.add_argument("--heads", type=int, nargs=4, metavar="N", help=sizes)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    parser.add_argument(
        "--kv", choices=(FLOAT16, INT8), help="what keys and values are kept in (default: as dtype says)"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="measure whole steps of this model, too")
    parser.add_argument("--quant", choices=tuple(QUANTS), default="none", help="of its weights")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="to measure for (default 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
