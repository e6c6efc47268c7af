"""`python -m loadtest.peer_baton`: Baton's own engine, driven through its pipes; see `closed_loop.serve`."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.closed_loop import Job, own_stdout, serve
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.engine.worker_settings import itl_target
from shared.settings.sections import EngineSettings

POOL_BYTES = 1 << 30
STEP_S = 300.0


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
        if failed := [u.detail for u in updates if u.finish == "error"]:
            raise RuntimeError(failed[0])
        return [(int(u.seq_id), len(u.token_ids), bool(u.finish)) for u in updates if u.token_ids or u.finish]


def main(argv: Sequence[str]) -> int:
    """Serve until standard input ends; exit code 0."""
    answers = own_stdout()
    options = _parser().parse_args(argv)
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=folder) as kv_dir:
        worker = open_worker_engine(worker_options(options, Path(kv_dir)), WorkerId("bench"))
        worker.start()
        try:
            serve(BatonDriver(worker), worker.facts.numerics, sys.stdin, answers)
        finally:
            worker.stop(30)
    return 0


def worker_options(options: argparse.Namespace, kv_dir: Path) -> WorkerOptions:
    """A decode worker's as settings make it by default, with all of the machine, and without the start's self-check."""
    engine = EngineSettings()
    return WorkerOptions(
        model_dir=options.model,
        kv_dir=kv_dir,
        dtype=options.dtype,
        pool_bytes=POOL_BYTES,
        token_budget=options.token_budget or engine.token_budget,
        lone_token_budget=engine.prefill_token_budget,
        itl_target=itl_target(engine.itl_target_ms),
        max_num_seqs=32,
        threads=options.threads,
        kernels=options.kernels,
        quick_head=engine.quick_head,
        self_check=False,
        **({} if options.quant == "none" else {"quant": options.quant}),
    )


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="loadtest.peer_baton")
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--quant", default="none")
    options.add_argument("--threads", type=int, required=True)
    options.add_argument("--kernels", default="native")
    options.add_argument("--token-budget", type=int, default=0)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
