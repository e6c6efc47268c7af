"""`./baton bench quality`: how far a configuration's next-token distributions are from float32's on fixed texts.

Teacher-forced: at every position of a text both models see the same tokens, and what they expect next is compared, as
KL(float32 || configuration) in nats and by whether the most likely token is the same. float32 is computed by torch,
apart from all native code; of a family that runs on a GPU alone, there. Batches do not change bits on a CPU, and on a
GPU only the last ones, so what holds of prompts holds of decoding.

Texts are cut into windows of at most `WINDOW` tokens, each begun anew; every position counts.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from kernels.dispatch import UnknownKernels, choose
from kernels.linear.quantize import GPU_QUANTS, NONE
from loadtest.machine import this_machine
from shared.contracts.errors import BatonError, Internal, SettingsError
from shared.contracts.ids import WorkerId
from shared.engine.forward_batch import build_forward_batch
from shared.engine.numerics import numerics_id
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.kv.layout import FLOAT16, KV_SETTINGS, PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.model.config import layer_groups, load_config, packed_as
from shared.model.decoder import Model, configuration_of, load_decoder
from shared.model.digest import model_digest
from shared.model.family import LLAMA
from shared.model.fetch import cache_dir, fetch_default_model
from shared.model.gguf_folder import model_folder
from shared.model.kv_dtype import kv_dtype_of
from shared.model.quality_gate import (
    AUTO,
    FLOAT32,
    LEAST_TOP1,
    MOST_KL,
    MOST_OF_MEAN,
    SAME,
    SHIPPED,
    Configuration,
    Record,
    SetFigures,
    keep_record,
    own_results,
)
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from shared.model.device_decoder import DeviceDecoder

TEXTS = Path(__file__).with_name("quality_texts")
WINDOW = 2048
CHUNK = 256
BLOCK = 32
ROWS = 64
"""Rows compared at a time: they are as wide as the vocabulary."""
ON_GPU = "triton"
ALL = (
    Configuration("native", "float32"),
    Configuration("native", "bfloat16"),
    Configuration("torch", "bfloat16"),
    Configuration("native", "bfloat16", "int8"),
    Configuration("native", "bfloat16", "int4"),
    Configuration("native", "bfloat16", "int4-g64"),
    Configuration("native", "bfloat16", "int4-g128"),
    Configuration("native", "float32", kv="float16"),
    Configuration("native", "bfloat16", kv="float16"),
    Configuration("native", "float32", kv="int8"),
    Configuration("native", "bfloat16", kv="int8"),
    Configuration("native", "bfloat16", "int8", kv="int8"),
)
"""What `--all` measures; float32 on native kernels to see what two ways of summing float32 differ by."""
ALL_ON_GPU = (
    Configuration(ON_GPU, "bfloat16"),
    Configuration(ON_GPU, "bfloat16", "int8"),
    Configuration(ON_GPU, "bfloat16", "int4"),
    Configuration(ON_GPU, "bfloat16", "w8a8"),
    Configuration(ON_GPU, "bfloat16", "fp8"),
    Configuration(ON_GPU, "bfloat16", kv="int8"),
    Configuration(ON_GPU, "bfloat16", "int8", kv="int8"),
)
"""The same with `--kernels triton`."""


@dataclass(slots=True)
class Sums:
    """Sums over the positions of a set so far."""

    positions: int = 0
    kl: float = 0.0
    same: int = 0

    def add(self, reference: Tensor, logits: Tensor) -> None:
        """Compare rows, both [positions, vocab_size]. Raises Internal where a logit is not finite."""
        for wanted, found in zip(torch.split(reference, ROWS), torch.split(logits, ROWS), strict=True):
            p, q = (rows.log_softmax(dim=1) for rows in (wanted, found))
            kl = float((p.exp() * (p - q)).sum(dtype=torch.float64))
            if not abs(kl) < float("inf"):
                raise Internal(f"logits that are not finite after {self.positions} positions")
            self.kl += max(0.0, kl)
            self.same += int((wanted.argmax(dim=1) == found.argmax(dim=1)).sum())
            self.positions += len(wanted)

    def figures(self) -> SetFigures:
        return SetFigures(self.positions, self.kl / self.positions, self.same / self.positions)


class Reader:
    """A model that reads windows of text, with a pool of its own.

    Args:
        folder, name: where the pool's file is made, and for whom.
        longest: most tokens of a window.
        kv: what its KV is kept in, as `Configuration.kv` has it.

    Raises:
        SettingsError: the model's KV cannot be kept so, or no pool be made in the folder.
    """

    def __init__(self, model: Model, folder: Path, name: str, longest: int, kv: str = SAME) -> None:
        self._model = model
        self.kv_dtype = kv_dtype_of(AUTO if kv == SAME else kv, model)
        self._groups = layer_groups(model.config, BLOCK, self.kv_dtype, tile_layout=model.kernels.tile_layout)
        self._table = tuple(range(-(-longest // BLOCK)))
        layout = PoolLayout(self._groups, (len(self._table),) * len(self._groups))
        self.pool: Pool = create_pool(folder, WorkerId(name), layout)

    def close(self) -> None:
        """Unlink the pool."""
        self.pool.close()

    @torch.inference_mode()
    def read(self, start: int, token_ids: Sequence[int]) -> Tensor:
        """Logits after each of the tokens from position `start`, the earlier ones having been read: [tokens, vocab]."""
        tables = (self._table,) * len(self._groups)
        sequence = ScheduledSequence("text", start, tuple(token_ids), tables, len(token_ids), None)
        batch = build_forward_batch(StepPlan(1, (sequence,)), self._groups, all_logits=True)
        return self._model.forward(batch, self._groups, self.pool.views())


def windows(token_ids: Sequence[int], longest: int) -> list[Sequence[int]]:
    """A text in consecutive windows of at most `longest` tokens. Pure."""
    return [token_ids[i : i + longest] for i in range(0, len(token_ids), longest)]


class AnyReader(Protocol):
    """A `Reader`, or one on a GPU."""

    kv_dtype: str

    def read(self, start: int, token_ids: Sequence[int]) -> Tensor: ...

    def close(self) -> None: ...


def compare(
    reference: AnyReader, others: Sequence[AnyReader], token_ids: Sequence[int], longest: int
) -> list[SetFigures]:
    """One set's figures of each of the others. Raises Internal where a logit is not finite."""
    sums = [Sums() for _ in others]
    for window in windows(token_ids, longest):
        for start in range(0, len(window), CHUNK):
            part = window[start : start + CHUNK]
            wanted = reference.read(start, part)
            for one, other in zip(sums, others, strict=True):
                one.add(wanted, other.read(start, part))
    return [one.figures() for one in sums]


def measure(folder: Path, wanted: Sequence[Configuration], threads: int) -> list[Record]:
    """Measure configurations of a model folder beside one another: float32 is computed once for all.

    Raises:
        SettingsError: the model, its tokenizer or a configuration cannot be used here.
        Internal: a logit is not finite.
    """
    sets = load_sets(folder)
    reference = Configuration("torch" if load_config(folder).family == LLAMA else ON_GPU, FLOAT32)
    models = [_load(folder, one, threads) for one in (reference, *wanted)]
    longest = min(WINDOW, models[0].config.max_positions)
    figures: list[dict[str, SetFigures]] = [{} for _ in wanted]
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-quality-", dir=_memory_folder()))
        kept = [SAME, *(one.kv for one in wanted)]
        readers = [
            _reader(model, Path(place), f"quality-{i}", longest, kv)
            for i, (model, kv) in enumerate(zip(models, kept, strict=True))
        ]
        for reader in readers:
            stack.callback(reader.close)
        for name, token_ids in sets.items():
            for i, found in enumerate(compare(readers[0], readers[1:], token_ids, longest)):
                figures[i][name] = found
                _say(f"{wanted[i]}, {name}: {_row(found)}")
    digest = model_digest(folder)
    return [
        Record(digest, folder.name, one, numerics_id(one.dtype, model.kernels, model.quant, reader.kv_dtype), found)
        for one, model, reader, found in zip(wanted, models[1:], readers[1:], figures, strict=True)
    ]


def of_checkpoint(folder: Path, wanted: Sequence[Configuration]) -> Sequence[Configuration]:
    """Configurations as they are of a checkpoint: integers that it holds stay, whatever else could be made of others.

    torch computes from the values of such integers: its float32 is what they are measured against.

    Raises:
        SettingsError: one asks for other integers, and none is left.
    """
    if not (own := packed_as(folder)):
        return wanted
    found = [one if one.kernels == "torch" else replace(one, quant=own) for one in wanted if one.quant == NONE.name]
    if not found:
        raise SettingsError(f"the weights of {folder} are {own} and stay so", param="--quant")
    return found


def _load(folder: Path, wanted: Configuration, threads: int) -> Model | DeviceDecoder:
    setting = NONE.name if wanted.quant == packed_as(folder) else wanted.quant
    if wanted.kernels == ON_GPU:
        try:
            choose(ON_GPU)
        except UnknownKernels as exc:
            raise SettingsError(str(exc), param="--kernels") from exc
        from loadtest.quality_device import load_on_device

        return load_on_device(folder, replace(wanted, quant=setting))
    model = load_decoder(folder, wanted.dtype, wanted.kernels, threads=threads, quant=setting)
    if configuration_of(model) != replace(wanted, kv=SAME):
        raise SettingsError(f"kernels {wanted.kernels!r} cannot be had here", param="--kernels")
    return model


def _reader(model: Model | DeviceDecoder, folder: Path, name: str, longest: int, kv: str) -> AnyReader:
    if model.kernels.triton:
        from loadtest.quality_device import DeviceReader

        return DeviceReader(cast("DeviceDecoder", model), longest, kv, BLOCK)
    return Reader(cast("Model", model), folder, name, longest, kv)


def load_sets(folder: Path) -> dict[str, list[int]]:
    """The committed texts as a model's tokens, by the name of their set. Raises SettingsError without a tokenizer."""
    tokenizer = load_tokenizer(folder)
    files = sorted(TEXTS.glob("*.txt"))
    sets = {path.stem: tokenizer.encode(path.read_text(encoding="utf-8"), parse_special=True) for path in files}
    return {name: token_ids for name, token_ids in sets.items() if token_ids}


def lines_of(records: Sequence[Record]) -> Iterator[str]:
    """The report: a line a set and one for the whole, of every configuration. Pure."""
    for record in records:
        yield f"{record.configuration}   {record.numerics}"
        for name, figures in record.sets.items():
            yield f"  {name:14}{_row(figures)}"
        yield f"  {'mean of sets':14}{record}"
        yield ""
    yield (
        f"passed: mean KL <= {MOST_KL:g} nat, mean top-1 >= {LEAST_TOP1:.0%}, no set's KL above {MOST_OF_MEAN:g} times "
        "the mean; sets weigh alike"
    )


def _row(figures: SetFigures) -> str:
    return f"{figures.positions:>6} positions   KL {figures.kl:.5f} nat   top-1 {figures.top1:7.2%}"


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code: 1 when a configuration that was asked for could not be measured."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    threads = max(1, options.threads)
    torch.set_num_threads(threads)
    try:
        cache = cache_dir(os.environ)
        folder = model_folder(options.model, cache, _say) if options.model else fetch_default_model(cache, _say)
        kv = KV_SETTINGS.get(options.kv, options.kv)
        one = Configuration(options.kernels, options.dtype, options.quant, kv)
        all_of_them = _all_on_gpu() if options.kernels == ON_GPU else ALL
        wanted = of_checkpoint(folder, all_of_them if options.all else (one,))
        keep = SHIPPED if options.ship else own_results(cache_dir(os.environ))
        records = measure(folder, wanted, threads)
        for record in records:
            keep_record(keep, record)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BatonError as exc:
        print(f"baton bench: {exc.message}", file=sys.stderr)
        return 1
    machine = this_machine()
    print(f"{folder.name}, {records[0].model}; {machine.cpu}, {machine.date}\n")
    print("\n".join(lines_of(records)))
    return 0


def _all_on_gpu() -> tuple[Configuration, ...]:
    """Without float8 where the card has none."""
    from loadtest.quality_device import has_float8

    return tuple(one for one in ALL_ON_GPU if one.quant != "fp8" or has_float8())


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _say(text: str) -> None:
    print(f"baton bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench quality",
        description="Measure how far a configuration is from float32 on fixed texts, and keep the result.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder or .gguf file (default: the default model)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    parser.add_argument("--quant", choices=tuple(GPU_QUANTS), default="none", help="of the weights (default none)")
    kv = (SAME, FLOAT16, *KV_SETTINGS)
    parser.add_argument("--kv", choices=kv, default=SAME, help="of its KV (default: as it computes)")
    parser.add_argument("--kernels", choices=("native", "torch", ON_GPU), default="native", help="default native")
    parser.add_argument("--all", action="store_true", help="every configuration that could be a default")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compute threads (default 1: torch's spin)")
    parser.add_argument("--ship", action="store_true", help="keep the result with the code, not in the cache")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
