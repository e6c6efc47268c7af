"""`./baton bench speculation`: the same prompts with and without prompt lookup, in turn, in one process.

Two engines, each as a decode worker has it; one of them computes at a time. Tokens a second count from the first token
of the last sequence on, so that prompts cost neither. The outputs of both must be equal, or it ends. The ratio of
processor time a token tells something even where others compute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from loadtest.machine import ForeignLoad, this_machine
from loadtest.speculation_texts import COPIES, PLAIN
from shared.contracts.errors import BatonError
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher_gauges import Gauges
from shared.engine.cores import usable_cores
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.model.fetch import cache_dir, fetch_default_model
from shared.text.tokenizer import load_tokenizer

WAIT_S = 600.0
TEXTS = {"copies": COPIES, "plain": PLAIN}


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of some streams."""

    tokens_s: float
    cpu_s: float  # processor time of a token
    outputs: dict[str, tuple[int, ...]]
    drafted: int
    accepted: int
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Of one kind of text, temperature and number of streams: medians over the rounds."""

    text: str
    temperature: float
    streams: int
    off_tokens_s: float
    on_tokens_s: float
    ratio: float  # of on to off, round by round
    cpu_ratio: float  # the same of processor time a token
    drafted: int  # in all rounds
    accepted: int
    foreign_cores: float  # the most of a round


class Contestant:
    """An engine and who listens to it."""

    def __init__(self, worker: WorkerEngine) -> None:
        self.worker = worker
        worker.engine.on_drawn = lambda plan, steps: None  # there are stretches then; their tokens come once more
        self._outputs: dict[str, list[int]] = {}
        self._waiting: set[str] = set()
        self._began: dict[str, float] = {}
        self._at_start = 0
        self._cpu_at_start = 0.0
        self._ended = threading.Event()
        self._failed = ""

    def run(self, prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams], name: str) -> Turn:
        """All prompts at once, to their ends. Raises RuntimeError where one fails."""
        specs = [
            SequenceSpec(f"{name}-{i}", prompt, len(prompt), params)
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]
        self._outputs = {spec.seq_id: [] for spec in specs}
        self._waiting, self._began, self._failed = set(self._outputs), {}, ""
        self._ended.clear()
        self.worker.on_updates = self._take
        before, load = self._gauges(), ForeignLoad()
        self.worker.engine.call(lambda batcher: [batcher.reserve(spec) for spec in specs]).result(WAIT_S)
        if not self._ended.wait(WAIT_S) or self._failed:
            raise RuntimeError(self._failed or "the streams did not end")
        taken_s = time.perf_counter() - max(self._began.values())
        cpu_s = time.process_time() - self._cpu_at_start
        after = self._gauges()
        tokens = sum(map(len, self._outputs.values())) - self._at_start
        outputs = {str(i): tuple(self._outputs[spec.seq_id]) for i, spec in enumerate(specs)}
        return Turn(
            tokens_s=tokens / taken_s,
            cpu_s=cpu_s / tokens,
            outputs=outputs,
            drafted=after.drafted - before.drafted,
            accepted=after.accepted - before.accepted,
            foreign_cores=load.cores(),
        )

    def _gauges(self) -> Gauges:
        return self.worker.engine.call(lambda batcher: batcher.gauges()).result(WAIT_S)

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.seq_id not in self._outputs:
                continue
            self._outputs[update.seq_id].extend(update.token_ids)
            if update.token_ids and update.seq_id not in self._began:
                self._began[update.seq_id] = time.perf_counter()
                if len(self._began) == len(self._outputs):
                    self._at_start = sum(map(len, self._outputs.values()))
                    self._cpu_at_start = time.process_time()
            if update.finish:
                self._failed = update.detail if update.finish == "error" else self._failed
                self._waiting.discard(update.seq_id)
        if not self._waiting:
            self._ended.set()


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        figures = measure(options)
    except (BatonError, RuntimeError) as exc:
        print(f"baton bench: {exc}", file=sys.stderr)
        return 1
    body = {"machine": this_machine().body(), "figures": [asdict(figure) for figure in figures]}
    print(text_of(figures))
    if options.json:
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(options: argparse.Namespace) -> list[Figure]:
    """Both engines, in turn, over every cell. Raises RuntimeError where outputs differ."""
    cache = cache_dir(os.environ)
    folder = options.model or fetch_default_model(cache, lambda line: print(line, file=sys.stderr))
    tokenizer = load_tokenizer(folder)
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=shm)))
        off, on = (_open(stack, home, folder, most, options) for most in (0, options.most))
        figures = []
        for text in options.texts:
            prompts = [tuple(tokenizer.encode_prompt(prompt)) for prompt in TEXTS[text]]
            for temperature in options.temperatures:
                for streams in options.streams:
                    figures.append(_cell(off, on, text, temperature, streams, prompts, options))
                    print(text_of(figures[-1:]).splitlines()[-1], file=sys.stderr)
        return figures


def _open(stack: ExitStack, home: Path, folder: Path, most: int, options: argparse.Namespace) -> Contestant:
    kv_dir = home / str(most)
    kv_dir.mkdir()
    cores = options.threads or usable_cores()
    settings = WorkerOptions(
        folder, kv_dir, "auto", token_budget=192, lone_token_budget=512, pool_bytes=1 << 28, threads=cores,
        quick_head=True, device="cpu", most_drafted=most, self_check=False,
    )  # fmt: skip
    worker = open_worker_engine(settings, WorkerId("bench"))
    worker.start()
    stack.callback(worker.stop, 30)
    return Contestant(worker)


def _cell(
    off: Contestant, on: Contestant, text: str, temperature: float, streams: int, prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
) -> Figure:  # fmt: skip
    turns: list[tuple[Turn, Turn]] = []
    for number in range(options.rounds):
        chosen = [prompts[(number + i) % len(prompts)] for i in range(streams)]
        sampling = [
            SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=100 * number + i, ignore_eos=True)
            for i in range(streams)
        ]
        name = f"{text}-{temperature}-{streams}-{number}"
        order = (off, on) if number % 2 == 0 else (on, off)
        one, two = (contestant.run(chosen, sampling, name) for contestant in order)
        if one.outputs != two.outputs:
            raise RuntimeError(f"{name}: the outputs differ")
        turns.append((one, two) if number % 2 == 0 else (two, one))
    return Figure(
        text,
        temperature,
        streams,
        median(a.tokens_s for a, _ in turns),
        median(b.tokens_s for _, b in turns),
        median(b.tokens_s / a.tokens_s for a, b in turns),
        median(b.cpu_s / a.cpu_s for a, b in turns),
        sum(b.drafted for _, b in turns),
        sum(b.accepted for _, b in turns),
        max(turn.foreign_cores for pair in turns for turn in pair),
    )


def text_of(figures: Sequence[Figure]) -> str:
    """A line a cell."""
    head = f"{'text':8} {'temp':>5} {'streams':>7} {'off tok/s':>10} {'on tok/s':>10} {'ratio':>7} {'cpu':>6}"
    lines = [f"{head} {'accepted':>14}"]
    for f in figures:
        lines.append(
            f"{f.text:8} {f.temperature:5.1f} {f.streams:7} {f.off_tokens_s:10.1f} {f.on_tokens_s:10.1f}"
            f" {f.ratio:6.2f}x {f.cpu_ratio:5.2f}x {f.accepted:6} of {f.drafted:5}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton bench speculation", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: the default model)")
    parser.add_argument("--most", type=int, default=8, metavar="K", help="engine.speculation_max_tokens (default 8)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of each cell (default 4)")
    parser.add_argument("--tokens", type=int, default=160, metavar="N", help="of each output (default 160)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default 1 2 4 8")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], metavar="T", help="default 0")
    parser.add_argument("--texts", nargs="+", choices=sorted(TEXTS), default=sorted(TEXTS), help="default both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
