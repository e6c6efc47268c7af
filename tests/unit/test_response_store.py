"""The end of a stored response found in the last parts of its answer, or where that is not enough in all of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.dialect import frames
from services.gateway.event_log import FRAME_END, PART_BYTES, EventLog, make_parts
from services.gateway.response_store import ResponseStore
from services.policy.idempotency import PARTS_AT_ONCE
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts.ids import RequestId


class _Policy:
    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts
        self.asked: list[r.ResponseFind] = []

    async def ask_policy(self, subject: str, ask: r.ResponseFind, replies: Any) -> r.ResponseFound:
        self.asked.append(ask)
        first = max(0, len(self.parts) - PARTS_AT_ONCE) if ask.last_parts else ask.known_parts
        parts = tuple(self.parts[first : first + PARTS_AT_ONCE])
        return r.ResponseFound(outcome=i.DONE, run=1, num_parts=len(self.parts), num_input=1, parts=parts)


def answer(final: dict[str, Any], *, stream: bool, events_before: int = 0) -> list[bytes]:
    log = EventLog(1)
    log.begin(200, stream=stream)
    told = [{"type": "response.output_text.delta", "delta": "x" * 1000, "n": n} for n in range(events_before)]
    told.append({"type": "response.completed", "response": final})
    events = frames(told).split(FRAME_END)[:-1] if stream else [json.dumps(final).encode()]
    return make_parts(log, 0, events, last=True)


@pytest.mark.parametrize(
    ("chars", "stream", "events_before", "asks"),
    [
        (10, False, 0, 1),
        (10, True, 3, 1),
        (10, True, 3000, 1),  # more parts than come at once, the end in the last one
        (PART_BYTES * 3, True, 3000, 1),  # the end itself in several
        (PART_BYTES * PARTS_AT_ONCE * 2, True, 10, 4),  # in more than come at once
        (PART_BYTES * PARTS_AT_ONCE * 2, False, 0, 4),
    ],
)
async def test_the_end_is_found(chars: int, stream: bool, events_before: int, asks: int) -> None:
    final = {"object": "response", "status": "completed", "text": "y" * chars}
    policy = _Policy(answer(final, stream=stream, events_before=events_before))
    store = ResponseStore(SimpleNamespace(ingress=policy))  # type: ignore[arg-type]
    kept = await store.look(b"key", RequestId("req-1"))
    assert kept.final == final
    assert len(policy.asked) == asks
