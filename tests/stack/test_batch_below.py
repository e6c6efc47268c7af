"""A batch runs below interactive work: it delays nobody's first token, and an interactive flood does not starve it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.stack.batch_runs import batch_line, batches_of
from tests.stack.running import MODEL, Baton
from tests.stack.streams import END_S

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

LINES, TOKENS = 200, 150
SLACK_S = 3.0
"""Of a machine that has other things to do. Behind the batch a request would wait for tens of its lines."""


def first_token_s(client: openai.OpenAI, prompt: int) -> float:
    """Seconds to the first token of an interactive request."""
    began = time.monotonic()
    with client.completions.create(
        model=MODEL, prompt=list(range(prompt, prompt + 20)), max_tokens=4, stream=True
    ) as chunks:
        next(iter(chunks))
        return time.monotonic() - began


async def test_interactive_requests_do_not_wait_for_a_batch_and_do_not_starve_it(fake_stack: Baton) -> None:
    client = fake_stack.openai()
    idle = [first_token_s(client, number) for number in range(5)]
    async with batches_of(fake_stack) as batches:
        # Given a batch that takes every slot it may
        batch_id = await batches.begin([batch_line(f"line-{number}", TOKENS) for number in range(LINES)])
        await batches.reach(batch_id, 1)
        # When interactive requests come, one after the other
        busy = [first_token_s(client, 100 + number) for number in range(10)]
        before = await batches.now(batch_id)
        assert before.completed + before.failed < LINES - 32, "the batch has to be under way meanwhile"
        # Then they are served as if there were no batch
        assert max(busy) < max(idle) + SLACK_S, (idle, busy)
        # When they come in a flood, the batch goes on all the same
        flood_until = time.monotonic() + 3.0

        def flood(lane: int) -> float:
            slowest = 0.0
            while time.monotonic() < flood_until:
                slowest = max(slowest, first_token_s(client, 1000 + 50 * lane))
            return slowest

        with ThreadPoolExecutor(8) as lanes:
            running = [lanes.submit(flood, lane) for lane in range(8)]
            await batches.reach(batch_id, before.completed + before.failed + 16)
            slowest = [lane.result(END_S) for lane in running]
        assert max(slowest) < max(idle) + SLACK_S
        await batches.cancel(batch_id)
        assert (await batches.end(batch_id)).status == "cancelled"
