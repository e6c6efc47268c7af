"""Which worker holds which block tag. Pure, soft state: a hint that the worker itself checks again.

Each worker numbers its events from 1 in each incarnation. Numbers that come in order are applied; a number that was
seen is dropped; a gap means events were lost, so the worker is asked for a snapshot, again and again until it comes.
What comes in the meantime is applied as well: it is news, and the snapshot replaces everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.contracts.ids import BlockTag, Incarnation, WorkerId
from shared.contracts.messages import BlockEvents
from shared.contracts.parts import GroupTags, Holder

REPLAY_RETRY_S = 2.0

Entry = tuple[int, BlockTag]  # (layer group, tag)


@dataclass(slots=True)
class WorkerBlocks:
    """What one incarnation of a worker holds. `number` is that of its newest event seen."""

    incarnation: Incarnation
    number: int = 0
    incomplete: bool = True  # events were lost, or may have been sent before this process listened
    asked_s: float = float("-inf")
    entries: set[Entry] = field(default_factory=set)


class BlockIndex:
    """The map, for all pools at once: tags are keyed hashes, so those of different pools or scopes never meet."""

    def __init__(self) -> None:
        self._holders: dict[Entry, set[WorkerId]] = {}
        self._workers: dict[WorkerId, WorkerBlocks] = {}

    def __len__(self) -> int:
        """Different (group, tag) pairs some worker holds."""
        return len(self._holders)

    def admit(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """A worker appeared, or began anew: it holds nothing until it says so, and it is asked."""
        self.drop(worker)
        self._workers[worker] = WorkerBlocks(incarnation)

    def drop(self, worker: WorkerId) -> None:
        """A worker is gone, and its blocks with it."""
        known = self._workers.pop(worker, None)
        for entry in known.entries if known is not None else ():
            self._remove_holder(worker, entry)

    def apply(self, event: BlockEvents) -> None:
        """Take one event of an admitted worker; others are dropped."""
        known = self._workers.get(event.worker)
        if known is None or event.incarnation != known.incarnation or event.number <= known.number:
            return
        if event.snapshot:
            self._replace(event.worker, known, _entries(event.stored))
            known.incomplete = False
        else:
            if event.number == 1:
                known.incomplete = False
            elif event.number != known.number + 1:
                known.incomplete = True
            self._remove(event.worker, known, _entries(event.removed))
            self._store(event.worker, known, _entries(event.stored))
        known.number = event.number

    def forget(self, entries: Iterable[Entry]) -> int:
        """These tags are held by nobody any more; how many were."""
        count = 0
        for entry in entries:
            holders = self._holders.pop(entry, None)
            count += holders is not None
            for worker in holders or ():
                self._workers[worker].entries.discard(entry)
        return count

    def replays_due(self, now: float) -> list[tuple[WorkerId, int]]:
        """Workers to be asked for a snapshot now, with the number of the last event seen of each."""
        due = []
        for worker, known in self._workers.items():
            if known.incomplete and now - known.asked_s >= REPLAY_RETRY_S:
                known.asked_s = now
                due.append((worker, known.number))
        return due

    def match(self, chains: Sequence[GroupTags], workers: Iterable[WorkerId]) -> tuple[Holder, ...]:
        """For each of `workers` that holds any: how many leading blocks of each chain, most first."""
        counts = [self._leading(chain) for chain in chains]
        holders = [
            Holder(worker, blocks)
            for worker in workers
            if any(blocks := tuple(count.get(worker, 0) for count in counts))
        ]
        return tuple(sorted(holders, key=lambda holder: (-sum(holder.blocks), holder.worker)))

    def _leading(self, chain: GroupTags) -> dict[WorkerId, int]:
        counts: dict[WorkerId, int] = {}
        still: set[WorkerId] | None = None
        for length, tag in enumerate(chain.tags, start=1):
            holders = self._holders.get((chain.group, tag), set())
            still = holders if still is None else still & holders
            if not still:
                break
            counts.update(dict.fromkeys(still, length))
        return counts

    def _replace(self, worker: WorkerId, known: WorkerBlocks, entries: Iterator[Entry]) -> None:
        new = set(entries)
        self._remove(worker, known, iter(known.entries - new))
        self._store(worker, known, iter(new))

    def _store(self, worker: WorkerId, known: WorkerBlocks, entries: Iterator[Entry]) -> None:
        for entry in entries:
            known.entries.add(entry)
            self._holders.setdefault(entry, set()).add(worker)

    def _remove(self, worker: WorkerId, known: WorkerBlocks, entries: Iterator[Entry]) -> None:
        for entry in entries:
            known.entries.discard(entry)
            self._remove_holder(worker, entry)

    def _remove_holder(self, worker: WorkerId, entry: Entry) -> None:
        holders = self._holders.get(entry)
        if holders is not None:
            holders.discard(worker)
            if not holders:
                del self._holders[entry]


def _entries(groups: Sequence[GroupTags]) -> Iterator[Entry]:
    return ((group.group, tag) for group in groups for tag in group.tags)
