"""The queue of references to items: putting them there, and noticing that it has lost some.

All that is worth keeping lies in Redis; a NATS server that comes back without its store has forgotten what was to be
done. Then nobody works at the items of a tenant, and yet they have no result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.batch.store import BatchStore
from shared.bus.bus import Bus
from shared.bus.streams import stream_name
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import Unavailable
from shared.contracts.ids import BatchId, TenantId

ITEM_STREAM = stream_name("batch.item")
PUBLISH = 100
"""Items published at once."""
EMPTY_LOOKS = 2
"""So often in a row the queue must be empty: what is on its way there, or was just taken, is not lost."""

JobKey = tuple[TenantId, BatchId]


def durable_of(tenant: TenantId) -> str:
    """The consumer of a tenant's items."""
    return f"batch-{tenant}"


async def publish_items(bus: Bus, store: BatchStore, key: JobKey, numbers: Sequence[int], mark: str = "") -> None:
    """Put those of a batch's items that have no result on the queue. Raises Unavailable.

    Args:
        mark: tells one time from another; the stream takes an item with the same mark only once.
    """
    tenant, batch_id = key
    for first in range(0, len(numbers), PUBLISH):
        names = await store.items.unfinished(tenant, batch_id, numbers[first : first + PUBLISH])
        await asyncio.gather(
            *(
                bus.publish_durable(
                    subjects.batch_item(tenant),
                    BatchItem(tenant=tenant, batch_id=batch_id, number=number, custom_id=custom_id),
                    message_id=f"{tenant}-{batch_id}-{number}{mark}",
                )
                for number, custom_id in names.items()
            )
        )


@dataclass(slots=True)
class _Seen:
    """How a batch stood when it last moved, and what was seen of the queue since."""

    counts: tuple[int, ...]
    moved_s: float
    looked_s: float
    empty: int = 0
    repeats: int = 0


class LossWatch:
    """Tells batches whose items the queue has lost from those that only wait.

    Args:
        look_s: between two looks at the queue of a batch in which nothing moves.
        stall_s: what has not moved for so long is taken for lost whatever the queue says; twice as long each time.
        clock: monotonic seconds.
    """

    def __init__(self, bus: Bus, look_s: float, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._look_s = look_s
        self._stall_s = stall_s
        self._clock = clock
        self._seen: dict[JobKey, _Seen] = {}

    async def lost(self, key: JobKey, counts: tuple[int, ...]) -> bool:
        """Whether the items of a batch that waits for them are to be put on the queue again.

        Args:
            counts: change whenever anything of the batch moves.
        """
        now = self._clock()
        seen = self._seen.get(key)
        if seen is None or seen.counts != counts:
            self._seen[key] = _Seen(counts, now, now)
            return False
        if now - seen.moved_s >= self._stall_s * 2**seen.repeats:
            seen.moved_s, seen.repeats = now, min(seen.repeats + 1, 10)
            return True
        if now - seen.looked_s < self._look_s:
            return False
        seen.looked_s = now
        seen.empty = seen.empty + 1 if await self._is_empty(key[0]) else 0
        if seen.empty < EMPTY_LOOKS:
            return False
        seen.empty = 0
        return True

    def forget(self, key: JobKey) -> None:
        """The batch waits no more, or not here."""
        self._seen.pop(key, None)

    async def _is_empty(self, tenant: TenantId) -> bool:
        try:
            return await self._bus.backlog(ITEM_STREAM, durable=durable_of(tenant)) == 0
        except Unavailable:  # NATS is away, or the consumer not there yet
            return False
