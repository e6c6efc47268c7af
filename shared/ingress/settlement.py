"""What a request came to, on its way to policy."""

from __future__ import annotations

import asyncio

import msgspec

from shared.bus.bus import Bus
from shared.contracts import subjects
from shared.contracts.errors import Unavailable
from shared.contracts.messages import Settle

SETTLE_TRIES = 8
SETTLE_PAUSE_S = 0.5


async def publish_settlement(bus: Bus, settle: Settle) -> None:
    """Publish until it is stored; again under the same epoch changes nothing. Raises Unavailable after about 14 s."""
    attempt = settle.attempt
    message_id = f"{attempt.request_id}-{attempt.epoch}-settle"
    for turn in range(1, SETTLE_TRIES + 1):
        try:
            await bus.publish_durable(subjects.POLICY_SETTLE, settle, message_id=message_id)
            return
        except Unavailable:
            if turn == SETTLE_TRIES:  # the reservation expires at policy
                raise
            await asyncio.sleep(SETTLE_PAUSE_S * turn)


def unbilled(settle: Settle) -> Settle:
    """The same without tokens: only the compute is booked."""
    return msgspec.structs.replace(settle, prompt_tokens=0, completion_tokens=0, cached_tokens=0)
