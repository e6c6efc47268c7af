"""The shell around `worker_tags`: asks the index for tags, tags blocks, and tells the index what is held.

Events are numbered and leave in the order of what happened in the pool, because one task drains them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shared.bus.bus import Bus
from shared.contracts import subjects
from shared.contracts.errors import BatonError
from shared.contracts.ids import BlockTag, Incarnation, WorkerId
from shared.contracts.messages import BlockEvents, Extend, Extended, Refusal
from shared.contracts.parts import GroupTags
from shared.engine.batcher import Batcher
from shared.engine.engine import Engine
from shared.engine.sequence_update import CompletedBlock
from shared.engine.worker_publisher import Publisher
from shared.engine.worker_tags import AskedRun, TagChains, Tagging
from shared.lifecycle.tasks import end_tasks

log = logging.getLogger("baton.worker")

BATCH_S = 0.05
"""How long news is gathered before it is acted on."""
EXTEND_TIMEOUT_S = 2.0
RETRY_S = 0.5
"""Pause after the index did not answer, or refused everything because it does not know this worker yet."""
EXTEND_RUNS = 64
PER_GROUP = tuple[tuple[BlockTag, ...], ...]


class Tagger:
    """Tags of one worker's blocks. Runs on the event loop; the pool is touched on the planner thread only."""

    def __init__(
        self, bus: Bus, publisher: Publisher, engine: Engine, worker: WorkerId, incarnation: Incarnation, groups: int
    ) -> None:
        self.chains = TagChains(groups)
        self._bus = bus
        self._publisher = publisher
        self._engine = engine
        self._worker = worker
        self._incarnation = incarnation
        self._taggings: list[Tagging] = []
        self._snapshot = True  # an index that was there before this worker needs to hear that it holds nothing
        self._number = 0
        self._wake = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def completed(self, seq_id: str, blocks: Sequence[Sequence[CompletedBlock]], *, ask: bool) -> None:
        """Blocks of a sequence became full; `ask` the index for the tags that are not known."""
        self._taggings += self.chains.completed(seq_id, blocks, ask)
        self._wake.set()

    def pool_changed(self) -> None:
        """Blocks may have been evicted."""
        self._wake.set()

    def replay(self) -> None:
        """The index lost events: send it everything held."""
        self._snapshot = True
        self._wake.set()

    async def close(self) -> None:
        await end_tasks(t for t in (self._task, self._asking) if t is not None)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_S)
            self._wake.clear()
            try:
                await self._apply()
            except BatonError as exc:
                log.debug("tags were not applied: %s", exc)
            except Exception:
                log.exception("tags were not applied")
                self._snapshot = True  # what was drained and not told is told by a snapshot
            if self._asking is None or self._asking.done():
                runs = self.chains.take_runs()
                if runs:
                    self._asking = asyncio.get_running_loop().create_task(self._ask(runs))

    async def _apply(self) -> None:
        """Tag what has a tag, and publish what changed."""
        taggings, self._taggings = self._taggings, []
        snapshot, self._snapshot = self._snapshot, False
        asked = self._engine.call(lambda b: _tag_and_drain(b, taggings, snapshot), at_once=snapshot)
        stored, removed = await asyncio.wrap_future(asked)
        if not snapshot and not any(stored) and not any(removed):
            return
        self._number += 1
        events = BlockEvents(
            worker=self._worker,
            incarnation=self._incarnation,
            number=self._number,
            stored=_per_group(stored),
            removed=() if snapshot else _per_group(removed),
            snapshot=snapshot,
        )
        self._publisher.send(subjects.index_events(self._worker), events)

    async def _ask(self, runs: list[AskedRun]) -> None:
        for i in range(0, len(runs), EXTEND_RUNS):
            part = runs[i : i + EXTEND_RUNS]
            message = Extend(worker=self._worker, incarnation=self._incarnation, runs=tuple(r.run for r in part))
            try:
                reply = await self._bus.request(
                    subjects.INDEX_EXTEND, message, Extended | Refusal, timeout_s=EXTEND_TIMEOUT_S
                )
            except BatonError as exc:
                log.debug("the index did not extend: %s", exc)
                reply = None
            except Exception:
                # without an answer the runs would never be asked for again, nor their chains forgotten
                log.exception("the index could not be asked")
                reply = None
            if isinstance(reply, Extended) and len(reply.runs) == len(part):
                for asked, answer in zip(part, reply.runs, strict=True):
                    self._taggings += self.chains.extended(asked, answer)
            else:
                for asked in part:
                    self.chains.failed(asked)
                await asyncio.sleep(RETRY_S)
        self._wake.set()


def _tag_and_drain(batcher: Batcher, taggings: list[Tagging], snapshot: bool) -> tuple[PER_GROUP, PER_GROUP]:
    """On the planner thread: tag, then (stored, removed) since the last drain, or everything held and nothing."""
    for tagging in taggings:
        block = tagging.block
        batcher.tag(tagging.group, block.block_id, block.generation, tagging.tag, block.token_ids)
    events = batcher.drain_events()
    if snapshot:
        return tuple(group.tags() for group in batcher.pool.groups), tuple(() for _ in events)
    return tuple(e.stored for e in events), tuple(e.removed for e in events)


def _per_group(tags: PER_GROUP) -> tuple[GroupTags, ...]:
    return tuple(GroupTags(group, held) for group, held in enumerate(tags) if held)
