"""Streams of the real model whose only decode worker is killed: they go on, and say what they would have said."""

from __future__ import annotations

import time

import pytest

from tests.stack.running import Baton
from tests.stack.streams import RESUME_S, Stream, kill, recovered, resumed_after_s

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9}


def begin(stack: Baton, count: int, max_tokens: int) -> list[Stream]:
    """Streams with different prompts, every other one greedy."""
    return [
        Stream(stack, f"Story number {i}: once upon a time", max_tokens, i, **(GREEDY if i % 2 else SEEDED))
        for i in range(count)
    ]


def kill_and_compare(stack: Baton, count: int, max_tokens: int) -> list[float]:
    undisturbed = [stream.end(RESUME_S * 3).text for stream in begin(stack, count, max_tokens)]
    streams = [stream.flowing() for stream in begin(stack, count, max_tokens)]
    kill(stack, stack.pid("decode"))
    killed = time.monotonic()
    assert [stream.end(RESUME_S * 3).text for stream in streams] == undisturbed
    for stream in streams:
        spans = {span["name"]: span["attributes"] for span in stack.trace(stream.id, "gateway.request")}
        assert spans["gateway.stream"]["baton.lost_workers"] == 1
    recovered(stack, workers=2)
    return [resumed_after_s(stream, killed) for stream in streams]


@pytest.mark.long  # OP-06 has one of each in every run
def test_a_greedy_and_a_seeded_stream_go_on(stack: Baton) -> None:
    waits = kill_and_compare(stack, 2, 60)
    print(f"\nfirst resumed token after {', '.join(f'{wait:.1f} s' for wait in waits)}")
    assert max(waits) < RESUME_S


@pytest.mark.long
def test_32_streams_go_on(stack: Baton) -> None:
    waits = kill_and_compare(stack, 32, 100)
    print(f"\nfirst resumed tokens after {min(waits):.1f} to {max(waits):.1f} s")
    assert max(waits) < RESUME_S * 2
