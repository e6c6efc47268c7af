"""Streams and prompts in one worker, in virtual time: what the automatic target keeps, on the step times of a machine.

The bounds are what vLLM gives on the same machine, and a fixed budget of 256 tokens: docs/results/peers.txt.
"""

from __future__ import annotations

from statistics import median

import pytest

from loadtest.closed_loop import Job
from loadtest.itl import MACHINES, Simulation, loop, main, quantile, worker
from shared.engine.prompt_budget import AUTO_TARGET, NO_TARGET

SEEDS = (1, 2, 3)


PEER_AT_32 = {"bf16": 0.968, "int8": 0.717}
PEER = (("bf16", 0.0588, 1.36, 68.4), ("int8", 0.0506, 0.98, 92.0))


@pytest.mark.parametrize(("machine", "p95_s", "first_s", "rate"), PEER)
def test_eight_streams_are_as_even_as_the_peers_and_faster(
    machine: str, p95_s: float, first_s: float, rate: float
) -> None:
    results = [loop(MACHINES[machine], worker(AUTO_TARGET), 8, seed) for seed in SEEDS]
    assert all(quantile(result.gaps_s, 0.95) < 0.96 * p95_s for result in results)
    assert all(result.output_tokens / result.seconds > 1.3 * rate for result in results)
    assert median(median(result.first_s) for result in results) <= 0.75 * first_s


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_thirty_two_lose_little_to_large_steps(machine: str, seed: int) -> None:
    kept, large = (loop(MACHINES[machine], one, 32, seed) for one in (worker(AUTO_TARGET), worker(NO_TARGET, 256, 256)))
    assert kept.output_tokens / kept.seconds > 0.97 * large.output_tokens / large.seconds
    assert quantile(kept.gaps_s, 0.95) < 0.75 * quantile(large.gaps_s, 0.95)
    assert quantile(kept.gaps_s, 0.95) < 0.4 * PEER_AT_32[machine]
    assert median(kept.first_s) < 1.15 * median(large.first_s)


def test_a_prompt_alone_and_a_stream_alone_are_not_held_back() -> None:
    simulation = Simulation(MACHINES["bf16"], worker(AUTO_TARGET), noise=0.0)
    simulation.run([Job(tuple(range(900)), 5)], 1)
    assert [step[:2] for step in simulation.steps] == [(0, 512), (0, 388), (1, 0), (1, 0), (1, 0), (1, 0)]


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--try", "30", "1.5", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 2 * 3
    assert "int8 c32 30 1.5 0" in lines[-1]
