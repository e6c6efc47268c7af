"""A worker carries out a purge: what runs of the tenant ends, and its blocks are overwritten before that is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shared.bus.bus import Bus
from shared.contracts.errors import BatonError
from shared.contracts.ids import WorkerId
from shared.contracts.messages import PurgeAck, PurgeOrder
from shared.kv.pool_file import mark_wiped, sweep, told, wiped
from shared.lifecycle.tasks import end_tasks
from shared.security.purge_orders import acknowledge

if TYPE_CHECKING:
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
async def lost_pools_told(bus: Bus, role: str, worker: WorkerId, folder: Path) -> AsyncIterator[None]:
    """Overwrite the pools of this folder that have no owner, and tell policy: to be entered before anything can fail,
    so that purges do not wait for a machine where no worker can be started."""
    for path in await asyncio.to_thread(sweep, folder):
        log.warning("removed a pool file without an owner: %s", path.name)
    telling = asyncio.create_task(_tell_until_heard(bus, role, worker, folder))
    try:
        yield
    finally:
        await end_tasks([telling])


@asynccontextmanager
async def own_pool_told(bus: Bus, role: str, worker: WorkerId, pool: Path) -> AsyncIterator[None]:
    """On leaving, tell policy if the worker's own pool is gone; when that fails the next worker of the folder does."""
    try:
        yield
    finally:
        if _marked_if_gone(pool, worker):
            with suppress(BatonError):
                await _tell(bus, role, worker, pool.parent, [worker])


def _marked_if_gone(pool: Path, worker: WorkerId) -> bool:
    if pool.exists():
        return False
    mark_wiped(pool.parent, worker)
    return True


async def _tell_until_heard(bus: Bus, role: str, worker: WorkerId, folder: Path) -> None:
    while gone := wiped(folder):
        try:
            await _tell(bus, role, worker, folder, gone)
            return
        except BatonError as exc:
            log.debug("policy was not told of pools that are gone: %s", exc)
        await asyncio.sleep(TELL_AGAIN_S)


async def _tell(bus: Bus, role: str, worker: WorkerId, folder: Path, gone: Sequence[WorkerId]) -> None:
    await acknowledge(bus, PurgeAck(purge_id="", owner=worker, service=role, wiped=tuple(gone)))
    told(folder, gone)
