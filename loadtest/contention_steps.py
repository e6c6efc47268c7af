"""The steps of `loadtest.contention_worker`, run as a worker's engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from loadtest.contention_worker import BLOCK, CHUNK, CONTEXT, SEQUENCES
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.core_share import CoreShare
from shared.engine.cores import usable_cores
from shared.engine.model_runner import ModelRunner
from shared.engine.model_steps import ModelSteps
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.kv.layout import PoolLayout
from shared.kv.pool import create_pool
from shared.model.config import layer_groups
from shared.model.decoder import load_decoder
from shared.model.native_decoder import NativeDecoder

Run = Callable[[str, bool], None]
"""One step of a kind, on a share of the cores or on all."""


@contextmanager
def open_steps(name: str, kinds: Sequence[str], model_dir: Path, dtype: str, quant: str, folder: Path) -> Iterator[Run]:
    """Load the model. Raises SettingsError."""
    cores = usable_cores()
    model = load_decoder(model_dir, dtype, "native", threads=cores, quant=quant)
    torch.set_num_threads(1)
    groups = layer_groups(model.config, BLOCK, dtype, tile_layout=model.kernels.tile_layout)
    plans = {kind: _plan(kind, model.config.vocab_size) for kind in kinds}
    blocks = SEQUENCES * -(-(CONTEXT + 1) // BLOCK) + CHUNK // BLOCK
    with create_pool(folder, WorkerId(name), PoolLayout(groups, (blocks,) * len(groups))) as pool:
        for view in pool.views():
            view.normal_(generator=torch.Generator().manual_seed(0))
        use = model.use_threads if isinstance(model, NativeDecoder) else None
        runner = ModelRunner(model, pool)
        with closing(CoreShare(folder / "cores", WorkerId(name), cores)) as share:
            steps = ModelSteps(runner.run, pool.zero_blocks, share, use)

            def run(kind: str, shared: bool) -> None:
                if shared:
                    steps.run(plans[kind])
                    return
                if use is not None:
                    use(cores)
                runner.run(plans[kind])

            for kind in kinds:
                run(kind, True)
            yield run


def _plan(kind: str, vocab_size: int) -> StepPlan:
    greedy, draw = SamplingParams(max_tokens=8, temperature=0.0), torch.Generator().manual_seed(0)
    if kind == "prefill":
        ids = tuple(torch.randint(0, vocab_size, (CHUNK,), generator=draw).tolist())
        table = tuple(range(CHUNK // BLOCK))
        return StepPlan(1, (ScheduledSequence("p", 0, ids, (table,), 0, None),))
    each = -(-(CONTEXT + 1) // BLOCK)
    tokens = torch.randint(0, vocab_size, (SEQUENCES,), generator=draw).tolist()
    rows = []
    for i, token in enumerate(tokens):
        table = tuple(range(CHUNK // BLOCK + i * each, CHUNK // BLOCK + (i + 1) * each))
        rows.append(ScheduledSequence(f"s{i}", CONTEXT, (token,), (table,), 1, greedy))
    return StepPlan(1, tuple(rows))
