"""A worker carries out a purge: what runs of the tenant ends, and its blocks are overwritten before that is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from shared.bus.bus import Bus
from shared.contracts.errors import BatonError
from shared.contracts.ids import WorkerId
from shared.contracts.messages import PurgeAck, PurgeOrder
from shared.lifecycle.tasks import end_tasks
from shared.security.purge_orders import acknowledge

if TYPE_CHECKING:
    from shared.engine.worker_engine import WorkerEngine
    from shared.engine.worker_shell import WorkerShell

log = logging.getLogger("baton.worker")

TELL_AGAIN_S = 2.0

LOOK_S, MOST_LOOK_S = 0.05, 1.0
"""Pauses between looks whether the blocks are overwritten: longer and longer while others still write in some."""


async def carry_out(
    shell: WorkerShell, order: PurgeOrder, end_requests: Callable[[PurgeOrder], Awaitable[int]]
) -> Mapping[str, int]:
    """Returns when nothing of what the order names is left in the pool; the requests ended, and blocks overwritten.

    Args:
        end_requests: ends the worker's requests that the order names, with an error; how many.

    Raises Unavailable when the engine has stopped.
    """
    ended = await end_requests(order)
    blocks = await shell.call(lambda batcher: batcher.purge(order.tenant, order.generation))
    shell.tagger.pool_changed()
    pause_s = LOOK_S
    while await shell.call(lambda batcher: batcher.pool.num_purged(blocks), at_once=False):
        await asyncio.sleep(pause_s)
        pause_s = min(MOST_LOOK_S, 1.5 * pause_s)
    shell.changed()
    return {"requests": ended, "blocks": sum(map(len, blocks))}


@asynccontextmanager
async def pools_told(bus: Bus, role: str, worker: WorkerId, core: WorkerEngine) -> AsyncIterator[None]:
    """Tell policy that the pools this worker found without an owner are overwritten; on leaving, if its own is gone."""
    telling = asyncio.create_task(_tell_until_heard(bus, role, worker, core.swept))
    try:
        yield
    finally:
        await end_tasks([telling])
        if not core.pool.path.exists():
            with suppress(BatonError):
                await _tell(bus, role, worker, [worker])


async def _tell_until_heard(bus: Bus, role: str, worker: WorkerId, gone: Sequence[WorkerId]) -> None:
    while gone:
        try:
            await _tell(bus, role, worker, gone)
            return
        except BatonError as exc:
            log.debug("policy was not told of pools that are gone: %s", exc)
        await asyncio.sleep(TELL_AGAIN_S)


async def _tell(bus: Bus, role: str, worker: WorkerId, gone: Sequence[WorkerId]) -> None:
    await acknowledge(bus, PurgeAck(purge_id="", owner=worker, service=role, wiped=tuple(gone)))
