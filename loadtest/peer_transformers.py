"""`python -m loadtest.peer_transformers`: transformers' model, driven through its pipes; see `closed_loop.serve`.

Static batches, as `generate` runs them. Requests of a batch must have one length of prompt: nothing is padded.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.closed_loop import Job, own_stdout, serve


class TransformersDriver:
    """A greedy loop over the model with its own cache; a batch begins when the one before has ended."""

    def __init__(self, torch: Any, model: Any) -> None:
        self._torch, self._model = torch, model
        self._waiting: list[tuple[int, Job]] = []
        self._running: list[tuple[int, Job]] = []
        self._came = 0
        self._cache: Any = None
        self._ids: Any = None

    def submit(self, number: int, job: Job) -> None:
        self._waiting.append((number, job))

    def step(self) -> list[tuple[int, int, bool]]:
        if not self._running:
            self._running, self._waiting = self._waiting, []
            self._ids = self._torch.tensor([job.prompt for _, job in self._running])
            self._cache, self._came = None, 0
        with self._torch.inference_mode():
            out = self._model(self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._cache, self._ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        self._came += 1
        moves = [
            (number, int(self._came <= job.max_tokens), self._came == job.max_tokens) for number, job in self._running
        ]
        if all(self._came >= job.max_tokens for _, job in self._running):
            self._running = []
        return moves


def main(argv: Sequence[str]) -> int:
    """Serve until standard input ends; exit code 0."""
    answers = own_stdout()
    options = argparse.ArgumentParser(prog="loadtest.peer_transformers")
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--threads", type=int, required=True)
    given = options.parse_args(argv)
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).eval()
    serve(TransformersDriver(torch, model), f"transformers {transformers.__version__}", sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
