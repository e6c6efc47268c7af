"""vLLM's engine, driven through its pipes, in the environment `./baton bench peers --install` makes.

Run as a file: nothing of Baton is on the path but the loop itself, whose names vLLM must not find by accident.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


def loop_module() -> Any:
    """`closed_loop.py` beside this file, without its package."""
    path = Path(__file__).with_name("closed_loop.py")
    spec = importlib.util.spec_from_file_location("closed_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["closed_loop"] = module
    spec.loader.exec_module(module)
    return module


class VllmDriver:
    """vLLM's engine, stepped in this thread."""

    def __init__(self, vllm: Any, options: argparse.Namespace) -> None:
        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=str(options.model),
            dtype=options.dtype,
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        ).llm_engine
        self._came: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0

    def submit(self, number: int, job: Any) -> None:
        sampling = self._sampling(temperature=0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False)
        self._next += 1
        name = str(self._next)
        self._numbers[name] = number
        self._engine.add_request(name, {"prompt_token_ids": list(job.prompt)}, sampling)

    def step(self) -> list[tuple[int, int, bool]]:
        found = []
        for output in self._engine.step():
            name, total = output.request_id, len(output.outputs[0].token_ids)
            found.append((self._numbers[name], total - self._came.get(name, 0), bool(output.finished)))
            self._came[name] = total
        return found


def main() -> int:
    """Serve until standard input ends; exit code 0."""
    loop = loop_module()
    answers = loop.own_stdout()
    options = argparse.ArgumentParser()
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--threads", type=int, required=True)
    given = options.parse_args()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(given.threads),
    }
    vllm = importlib.import_module("vllm")
    loop.serve(VllmDriver(vllm, given), f"vllm {vllm.__version__}", sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
