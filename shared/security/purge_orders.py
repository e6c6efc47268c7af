"""What every owner of copies does with the orders of a purge: refuse the old generation, carry it out, say so.

Policy publishes an order until it is acknowledged, so each may come any number of times; it is carried out once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

from shared.bus.bus import Bus, Delivery, Subscription
from shared.contracts import subjects
from shared.contracts.errors import BatonError
from shared.contracts.messages import PurgeAck, PurgeOrder
from shared.lifecycle.tasks import end_tasks
from shared.security.generations import Generations

log = logging.getLogger("baton.purge")

REMEMBERED = 256
"""Orders that are not carried out again when they come again; one that is takes nothing of a later generation."""

CarryOut = Callable[[PurgeOrder], Awaitable[Mapping[str, int]]]
"""Ends and forgets what the order names, and returns how much it was, by kind. When it raises, it is asked again with
the next publication."""


class PurgeOrders:
    """The orders one process takes. `start`, then `stop`.

    Args:
        service: as in the subjects table.
        owner: who acknowledges: the process, or the service whose processes share what they keep.

    Attributes:
        generations: risen by orders before anything else is done, so that nothing old comes in behind them.
    """

    def __init__(
        self, bus: Bus, service: str, owner: str, carry_out: CarryOut, generations: Generations | None = None
    ) -> None:
        self.generations = generations or Generations()
        self._bus = bus
        self._service = service
        self._owner = owner
        self._carry_out = carry_out
        self._done: OrderedDict[str, PurgeAck] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Take orders."""
        self._subscription = await self._bus.subscribe(subjects.PURGE_ORDER, PurgeOrder, self._on_order)

    async def stop(self) -> None:
        """Take no more; one in hand is given up, and asked for again."""
        if self._subscription is not None:
            await self._subscription.stop()
        await end_tasks(list(self._tasks.values()))

    def _on_order(self, delivery: Delivery) -> None:
        order: PurgeOrder = delivery.message
        self.generations.rise(order.tenant, order.generation)
        if order.purge_id not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._take(order))
            self._tasks[order.purge_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(order.purge_id, None))

    async def _take(self, order: PurgeOrder) -> None:
        try:
            if order.purge_id not in self._done:
                counts = await self._carry_out(order)
                log.warning("purge %s of tenant %s: %s", order.purge_id, order.tenant, dict(counts))
                self._done[order.purge_id] = PurgeAck(
                    purge_id=order.purge_id, owner=self._owner, counts=dict(counts), service=self._service
                )
                if len(self._done) > REMEMBERED:
                    self._done.popitem(last=False)
            await acknowledge(self._bus, self._done[order.purge_id])
        except BatonError as exc:
            log.warning("purge %s is not carried out yet: %s", order.purge_id, exc.message)
        except Exception:
            log.exception("purge %s is not carried out", order.purge_id)


async def acknowledge(bus: Bus, ack: PurgeAck) -> None:
    """Tell policy, durably. Raises Unavailable."""
    name = f"{ack.owner}-{ack.purge_id or '-'.join(ack.wiped)}"
    await bus.publish_durable(subjects.purge_ack(ack.service), ack, message_id=name)
