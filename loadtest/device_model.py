"""`python -m loadtest.device_model`: whole-model decode on a GPU, beside the time its bytes need on the same card.

A random model of a known shape, made on the device, decodes sequences that already have a context: once as graph
replays alone, once as a worker runs it, plan by plan, each step feeding the next. The limit is measured in that run:
bytes of weights and KV a step must read, over the rate of a plain device copy (bytes read and written).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.bench.journal import Journal, unwritable
from kernels.bench.machine import machine, told
from kernels.chip import capability
from kernels.dispatch import choose, choose_device
from kernels.linear.quantize import GPU_QUANTS
from shared.contracts.errors import SettingsError
from shared.contracts.sampling import SamplingParams
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_compute import DeviceCompute, StepLimits
from shared.engine.device_runner import DeviceRunner
from shared.engine.device_stream import DeviceStream
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.kv.device_spans import KvView, device_views
from shared.kv.layout import KV_SETTINGS, PoolLayout
from shared.model.checkpoint import expected_shapes
from shared.model.config import ModelConfig, layer_groups, parse_config
from shared.model.device_decoder import DeviceDecoder, require_float8
from shared.model.device_weights import load_weights
from shared.model.kv_dtype import AUTO, kv_dtype_on_gpu

BLOCK_SIZE = 32
COPY_BYTES = 4 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
CASES = (("llama-8b", 1, 1024), ("llama-8b", 256, 1024), ("qwen3-0.6b", 1, 1024), ("qwen3-0.6b", 64, 1024))


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. Times in seconds a step."""

    model: str
    sequences: int
    context: int
    step_bytes: int
    limit_s: float  # step_bytes at the rate of a copy
    graph_s: float  # median of replays
    runner_s: float  # median of steps as a worker runs them
    graph_samples: list[float]
    runner_samples: list[float]

    @property
    def share(self) -> float:
        return self.limit_s / self.graph_s

    def line(self) -> str:
        return (
            f"{self.model:12} B={self.sequences:<4} S={self.context:<6} limit {self.limit_s * 1e3:7.3f} ms"
            f"  graph {self.graph_s * 1e3:7.3f} ms = {self.share:5.1%}"
            f"  worker {self.runner_s * 1e3:7.3f} ms = {self.limit_s / self.runner_s:5.1%}"
            f"  {self.sequences / self.runner_s:9.0f} tokens/s"
        )


class RandomTensors:
    """A checkpoint's tensors, made up on the device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes = expected_shapes(config)
        self._device = device
        torch.manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device) * 0.02

    def kept(self, name: str) -> Tensor:
        return self[name]


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written ones counted, of the fastest of some device copies."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(_timed(lambda: target.copy_(source), 5) for _ in range(4))
    return COPY_BYTES / best


def _timed(launch: Any, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    launch()
    begin.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


class Case:
    """A model with sequences that have a context."""

    def __init__(self, model: DeviceDecoder, sequences: int, context: int, steps: int, kv_dtype: str) -> None:
        self.model = model
        self.sequences = sequences
        self.context = context
        config = model.config
        groups = layer_groups(config, BLOCK_SIZE, kv_dtype)
        each = groups[0].blocks_for(context + steps + 1)
        num_blocks = sequences * each
        self.layout = PoolLayout(groups, (num_blocks,))
        self.views = _random_pool(self.layout, model.device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self.tables = [tuple(order[i * each : (i + 1) * each]) for i in range(sequences)]
        limits = StepLimits(max(512, sequences), sequences, config.max_positions)
        self.compute = DeviceCompute(model, groups, self.views, limits)
        self.stream = DeviceStream(model.device)
        self.size = next(bucket for bucket in self.compute.buckets if sequences <= bucket)
        self.graphs = DecodeGraphs(self.stream, self.compute.decode, self.compute.draw)
        self.runner = DeviceRunner(self.compute, self.stream, self.graphs)
        self.step = 0

    @property
    def step_bytes(self) -> int:
        kv = self.layout.groups[0].token_bytes
        return self.model.weights.step_bytes + kv * self.context * self.sequences

    def plan(self, sampling: SamplingParams) -> StepPlan:
        """The next token of every sequence, out of the step before."""
        start, self.step = self.context + self.step - 1, self.step + 1
        token = IN_FLIGHT if self.step > 1 else 1
        return StepPlan(
            self.step,
            tuple(
                ScheduledSequence(f"s{i}", start, (token,), (table,), 1, sampling)
                for i, table in enumerate(self.tables)
            ),
        )

    def measure(self, name: str, rate: float, steps: int, sampling: SamplingParams) -> Row:
        self.graphs.capture([self.size])
        runner = self._run_steps(steps, sampling)
        graph = []
        with self.stream.use():
            for _ in range(5):
                graph.append(_timed(lambda: self.graphs.replay(self.size), 10))
        return Row(
            name,
            self.sequences,
            self.context,
            self.step_bytes,
            self.step_bytes / rate,
            statistics.median(graph),
            statistics.median(runner),
            graph,
            runner,
        )

    def _run_steps(self, steps: int, sampling: SamplingParams) -> list[float]:
        """Steps, one launched while the one before runs; seconds between the ends of each."""
        ends: list[float] = []
        pending = [self.runner.run(self.plan(sampling))]
        for _ in range(steps):
            pending.append(self.runner.run(self.plan(sampling)))
            output = pending.pop(0)()
            assert not output.bad_rows
            ends.append(time.perf_counter())
        pending.pop()()
        return [b - a for a, b in pairwise(ends[2:])]

    def profile(self) -> str:
        """Time by kernel of one step, launched kernel by kernel."""
        from torch.profiler import ProfilerActivity, profile

        with self.stream.use(), profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(3):
                self.graphs.replay(self.size)
            self.stream.synchronize()
        return str(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))


def _random_pool(layout: PoolLayout, device: torch.device) -> tuple[KvView, ...]:
    data = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    views = device_views(data, layout)
    for view in views:
        if view.scales is None:
            view.values.normal_()
        else:
            data.random_(0, 112)  # no NaN of float8 among them
            view.scales.fill_(0.01)
    return views


def make_model(
    name: str, device: torch.device, fuse: bool | None = None, quant: str = "none", exact: bool = False
) -> DeviceDecoder:
    """A random model of a known shape, computing in bfloat16."""
    config, kept = parse_config(SHAPES[name], Path(name)), GPU_QUANTS[quant]
    weights = load_weights(config, RandomTensors(config, device), device, torch.bfloat16, quant=kept)
    return DeviceDecoder(config, weights, choose("triton"), fuse, kept, exact)


def peer_step_s(name: str, sequences: int, context: int, steps: int, device: torch.device) -> float:
    """Seconds a step of transformers' own generation with continuous batching, same shape and load."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    fields = {key: value for key, value in SHAPES[name].items() if key != "architectures"}
    config = AutoConfig.for_model(fields.pop("model_type", "llama"), **fields)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]
    torch.set_default_dtype(torch.float32)
    prompts = [[1 + (i * 7 + j) % 250 for j in range(context)] for i in range(sequences)]
    times = []
    # the first call sets everything up; of the others, the difference is what the steps take
    for count in (4, 1, steps + 1):
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        model.generate_batch(inputs=prompts, generation_config=settings, persistent_manager=True)
        times.append(time.perf_counter() - begin)
    model.destroy_cached_continuous_batching_manager()
    return (times[2] - times[1]) / steps


def worker_times(journal: Journal | None, formats: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Seconds a step by model and sequences, of the journal's cases in these formats."""
    entries = journal.read() if journal else []
    of_formats = [entry for entry in entries if "runner_s" in entry and formats.items() <= entry.items()]
    return {(entry["model"], entry["sequences"]): entry["runner_s"] for entry in of_formats}


def measure_peers(ours: dict[tuple[str, int], float], only: str, journal: Journal | None, device: torch.device) -> None:
    """Print, and note in the journal, transformers' time of each case that we have a time of and it has not."""
    known = {(entry["peer"], entry["sequences"]) for entry in (journal.read() if journal else []) if "peer" in entry}
    for model, sequences, context in CASES:
        if (model, sequences) not in ours or (model, sequences) in known or only not in f"{model}-{sequences}":
            continue
        peer = peer_step_s(model, sequences, context, 64, device)
        ratio = f"{peer / ours[model, sequences]:.1f} x ours"
        line = f"{model:12} B={sequences:<4} transformers {peer * 1e3:.3f} ms a step, {ratio}"
        print(line, flush=True)
        if journal:
            journal.append(peer=model, sequences=sequences, step_s=peer, line=line)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--fuse", choices=("auto", "always", "never"), default="auto", help="products with norms in them for a few rows"
    )
    parser.add_argument("--quant", choices=tuple(GPU_QUANTS), default="none", help="of the weights (default none)")
    parser.add_argument("--kv", choices=(AUTO, *KV_SETTINGS), default=AUTO, help="of KV (default bfloat16)")
    parser.add_argument("--exact", action="store_true", help="products of exact pools")
    parser.add_argument("--profile", action="store_true", help="time by kernel")
    parser.add_argument("--peer", action="store_true", help="transformers' continuous batching too")
    parser.add_argument("--json", type=Path, help="write raw samples there")
    parser.add_argument(
        "--rows", type=Path, help="write each case there as it comes; what it holds of this card is left out"
    )
    options = parser.parse_args(argv)
    chosen, why = choose_device("cuda")
    if chosen != "cuda":
        print(f"no GPU to measure on: {why}", file=sys.stderr)
        return 1
    if why := unwritable(options.rows, options.json):
        print(why, file=sys.stderr)
        return 1
    device = torch.device(chosen, 0)
    try:
        require_float8(GPU_QUANTS[options.quant], device)
        kv_dtype = kv_dtype_on_gpu(options.kv, "bfloat16", capability(device))
    except SettingsError as exc:
        print(exc, file=sys.stderr)
        return 1
    rate = copy_rate(device)
    here = machine()
    print(f"{told(here)}: copy {rate / 1e12:.2f} TB/s")
    rows, name, model = [], "", None
    journal = Journal(options.rows, here) if options.rows else None
    formats = {"quant": options.quant, "kv": options.kv, "exact": options.exact, "fuse": options.fuse}
    known = worker_times(journal, formats)
    for case, sequences, context in CASES:
        if options.only not in f"{case}-{sequences}" or (case, sequences) in known:
            continue
        if model is None or case != name:
            name, model = case, None
            torch.cuda.empty_cache()
            fuse = {"auto": None, "always": True, "never": False}[options.fuse]
            model = make_model(case, device, fuse, options.quant, options.exact)
        run = Case(model, sequences, context, options.steps + 8, kv_dtype)
        rows.append(run.measure(case, rate, options.steps, SamplingParams(max_tokens=1, temperature=0.0)))
        print(rows[-1].line(), flush=True)
        known[case, sequences] = rows[-1].runner_s
        if journal:
            journal.append(**asdict(rows[-1]), line=rows[-1].line(), **formats, copy=rate)
        if options.profile:
            print(run.profile(), flush=True)
        run.graphs.drop()
        del run
    if options.peer:
        del model
        torch.cuda.empty_cache()
        measure_peers(known, options.only, journal, device)
    if options.json is not None:
        facts = {
            **here,
            "python": platform.python_version(),
            "quant": options.quant,
            "kv": options.kv,
            "exact": str(options.exact),
        }
        options.json.write_text(json.dumps({**facts, "copy": rate, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
