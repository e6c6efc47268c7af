"""kill -9 of every part in turn while a batch runs: every line has its result once, and is billed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.batch_runs import Ledger, batch_line, batches_of, tokens_in
from tests.stack.running import Baton, until
from tests.stack.streams import kill, recovered

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(420)]

LINES, TOKENS, PROMPT = 200, 100, 20
VICTIMS = (
    *("services.decode", "services.prefill", "services.policy", "services.scheduler"),
    *("services.prefix_cache_index", "services.gateway", "services.batch", "valkey-server", "nats-server"),
)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """One prefill and one decode worker of fake tokens: no other takes over, everything has to come back."""
    baton = Baton(tmp_path_factory.mktemp("batch-kills") / "state")
    try:
        baton.up("--fake")
        yield baton
        traces = baton.traces_outside()
        baton.down()
        baton.nothing_left(traces)
    finally:
        baton.kill_all()


def process_of(stack: Baton, name: str) -> int:
    """The process whose command line names it, once there is one again."""
    return until(lambda: next((pid for pid, line in stack.processes().items() if name in line), None), 60, lambda: name)


async def test_two_hundred_lines_and_a_kill_of_each_service_in_turn(fakes: Baton) -> None:
    ledger = Ledger(fakes)
    async with batches_of(fakes) as batches:
        # Given a batch that runs
        names = [f"line-{number}" for number in range(LINES)]
        batch_id = await batches.begin([batch_line(name, TOKENS) for name in names])
        # When each part is killed in turn, evenly over the batch
        for turn, victim in enumerate(VICTIMS, 1):
            await batches.reach(batch_id, turn * LINES // (len(VICTIMS) + 1), timeout_s=120)
            kill(fakes, process_of(fakes, victim))
        # Then all lines have a result, each once
        done = await batches.end(batch_id)
        assert (done.status, done.completed, done.failed) == ("completed", LINES, 0)
        lines = await batches.file(done.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == sorted(names)
        assert tokens_in(lines) == (LINES * PROMPT, LINES * TOKENS) == (done.prompt_tokens, done.completion_tokens)
        # And the ledger has each of them once
        await ledger.settles_at(tokens_in(lines))
        assert ledger.billed()[0] == LINES
    recovered(fakes, workers=2)
