"""`./baton bench engine`: one engine's steps, torch's kernels beside the native ones, in turn, in one process.

Measured is the whole step: plan to flat rows, forward pass, greedy sampling. Beside it stands what the weights alone
cost in the same minutes: a sweep of every product of the model with as many rows, nothing between them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.linear.quantize import QUANTS
from loadtest.machine import IDLE_CORES, this_machine
from loadtest.samples import Series, collect
from shared.contracts.errors import BatonError, SettingsError
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.model_runner import ModelRunner
from shared.engine.numerics import numerics_id
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.kv.layout import PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.model.config import layer_groups
from shared.model.decoder import Model, load_decoder
from shared.model.fetch import cache_dir, fetch_default_model
from shared.model.gguf_folder import model_folder
from shared.model.native_decoder import NativeDecoder

CONTEXT, CHUNK, BLOCK = 128, 512, 32
ENOUGH = 5
CONTESTANTS = ("torch", "native")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: one decode step of `sequences`, or a prompt of `tokens` in chunks."""

    name: str
    sequences: int = 1
    tokens: int = 0  # of a prompt; 0: decode

    @property
    def tokens_a_step(self) -> int:
        """Tokens that the thing measured brings."""
        return self.tokens or self.sequences

    @property
    def rows(self) -> int:
        """Rows of its products."""
        return min(self.tokens, CHUNK) or self.sequences

    @property
    def head_rows(self) -> int:
        """Rows of logits in a step."""
        return 1 if self.tokens else self.sequences

    @property
    def sweep(self) -> str:
        """Name of the sweep it is measured against."""
        return f"sweep {self.rows} {self.head_rows}"


CELLS = (
    Cell("decode B1", 1),
    Cell("decode B8", 8),
    Cell("decode B32", 32),
    Cell("prefill 512", tokens=512),
    Cell("prefill 2048", tokens=2048),
    Cell("prefill 8192", tokens=8192),
)
COPY_BYTES = 1 << 28
LONGEST = 2048


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        report = run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BatonError as exc:
        print(f"baton bench: {exc.message}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load the model once a contestant and measure. Raises SettingsError for a model that cannot be used."""
    cache = cache_dir(os.environ)
    folder = model_folder(options.model, cache, _say) if options.model else fetch_default_model(cache, _say)
    threads = options.threads or len(os.sched_getaffinity(0))
    models: dict[str, Model] = {}
    for name in contestants(options.only, options.quant):
        _say(f"loading {folder.name} for {name}")
        model = load_decoder(folder, options.dtype, name, threads=threads, quant=options.quant)
        if name == "torch" or model.kernels.native is not None:
            models[name] = model
    if not models:
        raise SettingsError("--only native: the native kernels cannot be had", param="--only")
    native, config = models.get("native"), next(iter(models.values())).config
    cells = cells_of(options.longest, config.max_positions)
    with ExitStack() as stack:
        pools = {name: stack.enter_context(_pool(model, cells, options.dtype, stack)) for name, model in models.items()}
        steps = _steps(models, cells, pools, threads)
        steps["copy"] = _copy()
        if isinstance(native, NativeDecoder):
            inner = native.native(pools["native"].layout.groups)
            for cell in cells:
                steps[cell.sweep] = lambda cell=cell: inner.sweep(cell.rows, cell.head_rows)  # type: ignore[misc]
        _say(f"measuring for {options.seconds:g} s, or until every figure has {ENOUGH} samples of an idle machine")
        series = collect(steps, options.seconds, ENOUGH)
    return {
        "bench": "engine",
        "model": folder.name,
        "dtype": options.dtype,
        "quant": options.quant,
        "threads": threads,
        "copy_gb_s": 2 * COPY_BYTES / series["copy"].step_s / 1e9,
        "weight_bytes": native.weight_bytes if isinstance(native, NativeDecoder) else None,
        "numerics": {name: numerics_id(options.dtype, model.kernels, model.quant) for name, model in models.items()},
        "machine": this_machine().body(),
        "figures": figures(series),
        "samples": {name: [asdict(sample) for sample in one.samples] for name, one in series.items()},
    }


def contestants(only: str | None, quant: str) -> tuple[str, ...]:
    """Who is measured: both, or the one asked for; integers are the native kernels' alone. Pure."""
    names = CONTESTANTS if quant == "none" else ("native",)
    return tuple(name for name in names if only in (None, name))


def cells_of(longest: int, max_positions: int) -> list[Cell]:
    """The cells with prompts up to `longest` that a model's context holds. Pure."""
    most = min(longest, max_positions)
    return [cell for cell in CELLS if (cell.tokens or CONTEXT + 1) <= most]


def figures(series: dict[str, Series]) -> list[dict[str, Any]]:
    """A row a cell: tokens a second of each contestant, the sweep, and the share of it. Pure."""
    rows = []
    for cell in CELLS:
        if not any(f"{name} {cell.name}" in series for name in CONTESTANTS):
            continue
        row: dict[str, Any] = {"cell": cell.name, "idle": True, "clean": 0, "dropped": 0}
        for name in CONTESTANTS:
            one = series.get(f"{name} {cell.name}")
            row[name] = None if one is None else cell.tokens_a_step / one.step_s
            if one is not None:
                row["idle"] &= one.idle
                row["clean"] += len(one.clean)
                row["dropped"] += len(one.samples) - len(one.clean)
        row["ratio"] = row["native"] / row["torch"] if row["native"] and row["torch"] else None
        sweep = series.get(cell.sweep)
        row["sweep_s"] = sweep.step_s if sweep else None
        chunks = -(-cell.tokens_a_step // cell.rows)
        row["share"] = sweep.step_s * chunks / (cell.tokens_a_step / row["native"]) if sweep and row["native"] else None
        rows.append(row)
    return rows


def text_of(report: dict[str, Any]) -> str:
    """The table. Pure."""
    machine = report["machine"]
    computed = f"{report['dtype']}, quant {report['quant']}, {report['threads']} threads"
    lines = [
        f"{report['model']}, {computed}; {machine['cpu']}, {machine['date']}",
        f"{'tokens a second':16}{'torch':>10}{'native':>10}{'ratio':>8}{'sweep ms':>10}{'share':>8}  samples",
    ]
    for row in report["figures"]:
        values = [
            _number(row["torch"], ".1f", 10),
            _number(row["native"], ".1f", 10),
            _number(row["ratio"], ".2f", 8),
            _number(row["sweep_s"] and row["sweep_s"] * 1e3, ".1f", 10),
            _number(row["share"], ".2f", 8),
        ]
        busy = "" if row["idle"] else "  BUSY MACHINE"
        lines.append(f"{row['cell']:16}{''.join(values)}  {row['clean']} clean, {row['dropped']} dropped{busy}")
    sweep, size = report["figures"][0]["sweep_s"], report["weight_bytes"]
    if sweep and size:
        lines.append(f"weights {size / 1e6:.0f} MB, swept at {size / sweep / 1e9:.1f} GB/s with one row")
    lines.append("share: what the sweep of as many rows, chunk by chunk, takes of the native figure's time")
    if not all(row["idle"] for row in report["figures"]):
        lines.append(f"Others used more than {IDLE_CORES:g} cores: these figures are no measure of this machine.")
    return "\n".join(lines)


def _number(value: float | None, form: str, width: int) -> str:
    return f"{'—' if value is None else format(value, form):>{width}}"


def _steps(
    models: dict[str, Model], cells: Sequence[Cell], pools: dict[str, Pool], threads: int
) -> dict[str, Callable[[], None]]:
    """Every cell of every contestant, contestants side by side."""
    runners = {name: ModelRunner(model, pools[name]) for name, model in models.items()}
    # native steps leave torch little to do, and its threads would spin on their cores: as in a worker
    torch_threads = {"torch": threads, "native": 1}
    steps: dict[str, Callable[[], None]] = {}
    vocab_size = next(iter(models.values())).config.vocab_size
    for cell in cells:
        plans = _plans(cell, vocab_size)
        for name, runner in runners.items():

            def step(runner: ModelRunner = runner, plans: list[StepPlan] = plans, name: str = name) -> None:
                if torch.get_num_threads() != torch_threads[name]:
                    torch.set_num_threads(torch_threads[name])
                for plan in plans:
                    runner.run(plan)

            steps[f"{name} {cell.name}"] = step
    return steps


def _plans(cell: Cell, vocab_size: int) -> list[StepPlan]:
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    draw = torch.Generator().manual_seed(0)
    if not cell.tokens:
        each = -(-(CONTEXT + 1) // BLOCK)
        tables = [tuple(range(i * each, (i + 1) * each)) for i in range(cell.sequences)]
        ids = torch.randint(0, vocab_size, (cell.sequences,), generator=draw).tolist()
        rows = [ScheduledSequence(f"s{i}", CONTEXT, (ids[i],), (table,), 1, greedy) for i, table in enumerate(tables)]
        return [StepPlan(1, tuple(rows))]
    ids = torch.randint(0, vocab_size, (cell.tokens,), generator=draw).tolist()
    table = tuple(range(-(-cell.tokens // BLOCK)))
    plans = []
    for start in range(0, cell.tokens, CHUNK):
        part, last = tuple(ids[start : start + CHUNK]), start + CHUNK >= cell.tokens
        row = ScheduledSequence("p", start, part, (table,), int(last), greedy if last else None)
        plans.append(StepPlan(1, (row,)))
    return plans


def _pool(model: Model, cells: Sequence[Cell], dtype: str, stack: ExitStack) -> Pool:
    """A pool of small random keys and values for all cells, in memory, as the model's kernels read it."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=_memory_folder()))
    blocks = max(max(cell.sequences * -(-(CONTEXT + 1) // BLOCK), -(-cell.tokens // BLOCK)) for cell in cells)
    groups = layer_groups(model.config, BLOCK, dtype, tile_layout=model.kernels.tile_layout)
    pool = create_pool(Path(folder), WorkerId("bench"), PoolLayout(groups, (blocks,)))
    for view in pool.views():
        view.normal_(generator=torch.Generator().manual_seed(0))
    return pool


def _copy() -> Callable[[], None]:
    """Memory read and written by a plain copy, for the machine's own speed."""
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    return copy


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _say(text: str) -> None:
    print(f"baton bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench engine", description="Measure steps of one engine: torch's kernels beside the native ones."
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder or .gguf file (default: the default model)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    parser.add_argument("--quant", choices=tuple(QUANTS), default="none", help="of the weights (default none)")
    parser.add_argument("--longest", type=int, default=LONGEST, metavar="N", help=f"prompts up to (default {LONGEST})")
    parser.add_argument("--only", choices=CONTESTANTS, help="leave the other out")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument("--seconds", type=float, default=100.0, metavar="S", help="to measure for (default 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser
