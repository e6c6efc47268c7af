"""`python -m loadtest.peer_baton`: Baton's own engine in a closed loop, in one process. Prints one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.closed_loop import Job, make_jobs, run_loop
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.sequence import SequenceSpec, SequenceUpdate
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.model.config import load_config

POOL_BYTES = 1 << 30
STEP_S = 300.0
TOKEN_BUDGET = 256
"""As the prototype's runs had: more in a step only makes its neighbours wait."""


class BatonDriver:
    """The engine with its two threads; updates come from the planner."""

    def __init__(self, worker: WorkerEngine) -> None:
        self._updates: queue.SimpleQueue[list[SequenceUpdate]] = queue.SimpleQueue()
        self._engine = worker.engine
        worker.on_updates = self._updates.put

    def submit(self, number: int, job: Job) -> None:
        sampling = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
        spec = SequenceSpec(str(number), job.prompt, len(job.prompt), sampling)
        self._engine.call(lambda batcher: batcher.reserve(spec)).result(STEP_S)

    def step(self) -> Sequence[tuple[int, int, bool]]:
        updates = self._updates.get(timeout=STEP_S)
        return [(int(u.seq_id), len(u.token_ids), bool(u.finish)) for u in updates if u.token_ids or u.finish]


def main(argv: Sequence[str]) -> int:
    """Run one loop; exit code 0."""
    options = parser("baton").parse_args(argv)
    jobs = make_jobs(options.requests, load_config(options.model).vocab_size, options.seed)
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=folder) as kv_dir:
        worker = open_worker_engine(
            WorkerOptions(
                model_dir=options.model,
                kv_dir=Path(kv_dir),
                dtype=options.dtype,
                pool_bytes=POOL_BYTES,
                token_budget=TOKEN_BUDGET,
                max_num_seqs=32,
                threads=options.threads,
                kernels=options.kernels,
                self_check=False,
                calibrate=False,
            ),
            WorkerId("bench"),
        )
        worker.start()
        try:
            result = run_loop(BatonDriver(worker), jobs, options.concurrency)
        finally:
            worker.stop(30)
    print(json.dumps(result.body() | {"build": worker.facts.numerics}), flush=True)
    return 0


def parser(name: str) -> argparse.ArgumentParser:
    """Options of every driver; `--kernels` is Baton's own."""
    options = argparse.ArgumentParser(prog=name)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--threads", type=int, required=True)
    options.add_argument("--kernels", default="auto")
    options.add_argument("--concurrency", type=int, required=True)
    options.add_argument("--requests", type=int, required=True)
    options.add_argument("--seed", type=int, default=1)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
