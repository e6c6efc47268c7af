"""Which workers a pool has, by their beats. Clock passed in (seconds, monotonic).

A worker counts from its first beat until its lease ends without one, its process is replaced (a higher incarnation),
its engine stands still by its own word, or it is found gone: one that missed two beats is asked, and when nobody
listens any more its process has ended. The lease is for freezes and partitions; who is silent and does not answer gets
nothing new meanwhile. One whose fingerprint differs from the pool's cannot exchange KV with the others and is refused.
Between beats the registry lowers a worker's free blocks and slots by what was placed on it: the next beat corrects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from services.scheduler.placement import DEFAULT_TOKEN_BUDGET, WorkerView
from shared.contracts.grants import CLASSES
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.messages import WorkerBeat
from shared.contracts.parts import AttemptProgress, ClassRoom

QUIET_S = 2.5
"""Two beats and a half: a worker silent for longer is asked whether it is there."""
ASK_EVERY_S = 1.0
FITS = ("model_digest", "block_sizes", "numerics", "token_bytes")
"""What of a beat goes into the fingerprint, and says more than that to who reads the log."""
UNRESPONSIVE_S = 5.0
"""One silent for so long that did not answer either gets nothing new."""
REMEMBER_LOST_S = 60.0
"""How long beats a lost process sent before are known for old, and what its pool could hold is waited for."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A process that is gone, or must be taken for gone."""

    worker: WorkerId
    incarnation: Incarnation
    role: str
    reason: str  # lease_expired | replaced | gone | stalled


@dataclass(frozen=True, slots=True)
class RefusedWorker:
    """A worker that does not fit the pool: both values, for the log."""

    worker: WorkerId
    field: str
    value: str
    expected: str


@dataclass(frozen=True, slots=True)
class _Lost:
    beat: WorkerBeat  # the last one
    until_s: float  # when it is forgotten


@dataclass(slots=True)
class _Entry:
    beat: WorkerBeat
    heard_s: float
    asked_s: float = float("-inf")
    unresponsive: bool = False
    placed_blocks: tuple[int, ...] = ()
    placed_sequences: int = 0
    placed_tokens: tuple[int, ...] = (0,) * len(CLASSES)


@dataclass(frozen=True, slots=True)
class BeatOutcome:
    """What a beat changed. `taken` is false for stale beats, other pools' and refused workers."""

    taken: bool
    joined: bool = False
    replaced: LostWorker | None = None
    refused: RefusedWorker | None = None


@dataclass(slots=True)
class WorkerRegistry:
    """The live workers of one model pool."""

    pool: str
    lease_s: float = 10.0
    _entries: dict[WorkerId, _Entry] = field(default_factory=dict)
    _lost: dict[WorkerId, _Lost] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, worker: object) -> bool:
        return worker in self._entries

    def on_beat(self, now: float, beat: WorkerBeat) -> BeatOutcome:
        """Take a beat. Stale ones (older incarnation, or not newer in number) change nothing, a lost process's too."""
        if beat.pool != self.pool:
            return BeatOutcome(taken=False)
        lost = self._lost.get(beat.worker)
        if lost is not None and (beat.incarnation, beat.number) <= (lost.beat.incarnation, lost.beat.number):
            return BeatOutcome(taken=False)
        old = self._entries.get(beat.worker)
        if beat.stalled:
            return BeatOutcome(taken=False, replaced=self.lose(beat.worker, now, "stalled"))
        if old is not None:
            if (beat.incarnation, beat.number) <= (old.beat.incarnation, old.beat.number):
                return BeatOutcome(taken=False)
            if beat.incarnation == old.beat.incarnation:
                self._entries[beat.worker] = _Entry(beat, now)
                return BeatOutcome(taken=True)
        gone = self.lose(beat.worker, now, "replaced")
        misfit = self._misfit(beat)
        if misfit is not None:
            return BeatOutcome(taken=False, replaced=gone, refused=misfit)
        self._entries[beat.worker] = _Entry(beat, now)
        return BeatOutcome(taken=True, joined=True, replaced=gone)

    def _misfit(self, beat: WorkerBeat) -> RefusedWorker | None:
        """The first live worker sets the pool's fingerprint; fakes and real workers never share a pool either."""
        for entry in self._entries.values():
            if entry.beat.fingerprint != beat.fingerprint:
                unlike = next((f for f in FITS if getattr(entry.beat, f) != getattr(beat, f)), "fingerprint")
                return RefusedWorker(beat.worker, unlike, str(getattr(beat, unlike)), str(getattr(entry.beat, unlike)))
            if entry.beat.fake != beat.fake:
                return RefusedWorker(beat.worker, "fake", str(beat.fake), str(entry.beat.fake))
            break
        return None

    def expire(self, now: float) -> list[LostWorker]:
        """Workers whose lease ended; they are forgotten until they beat again."""
        for worker in [w for w, lost in self._lost.items() if lost.until_s <= now]:
            del self._lost[worker]
        late = [worker for worker, entry in self._entries.items() if entry.heard_s + self.lease_s <= now]
        return [lost for worker in late if (lost := self.lose(worker, now, "lease_expired")) is not None]

    def quiet(self, now: float, deaf_s: float = float("-inf")) -> list[WorkerView]:
        """Workers to ask now whether they are there: silent for `QUIET_S`, and not asked in the last second.

        Args:
            deaf_s: when we last were without a connection: silence counts from then on.
        """
        found = []
        for worker, entry in sorted(self._entries.items()):
            if now - max(entry.heard_s, deaf_s) >= QUIET_S and now - entry.asked_s >= ASK_EVERY_S:
                entry.asked_s = now
                found.append(_view(self._entries[worker]))
        return found

    def nobody_listens(self, worker: WorkerId, asked_s: float, now: float) -> LostWorker | None:
        """A question put at `asked_s` found no listener: the process has ended, unless it has beaten since."""
        entry = self._entries.get(worker)
        return self.lose(worker, now, "gone") if entry is not None and entry.heard_s <= asked_s else None

    def no_answer(self, worker: WorkerId, asked_s: float, now: float) -> None:
        """A question put at `asked_s` was not answered, though somebody listens."""
        entry = self._entries.get(worker)
        if entry is not None and entry.heard_s <= asked_s and now - entry.heard_s >= UNRESPONSIVE_S:
            entry.unresponsive = True

    def lose(self, worker: WorkerId, now: float, reason: str) -> LostWorker | None:
        """Forget a worker, and what it may still have sent. None if it was not known."""
        entry = self._entries.pop(worker, None)
        if entry is None:
            return None
        beat = entry.beat
        self._lost[worker] = _Lost(beat, now + REMEMBER_LOST_S)
        return LostWorker(worker, beat.incarnation, beat.role, reason)

    def note_placed(
        self, worker: WorkerId, blocks: tuple[int, ...], num_tokens: int, num_sequences: int = 1, *, rank: int = 0
    ) -> None:
        """Count a placement until the worker's next beat shows it. `rank`: of its class."""
        entry = self._entries.get(worker)
        if entry is None:
            return
        before = entry.placed_blocks or (0,) * len(blocks)
        entry.placed_blocks = tuple(a + b for a, b in zip(before, blocks, strict=True))
        entry.placed_sequences += num_sequences
        entry.placed_tokens = tuple(n + num_tokens * (at == rank) for at, n in enumerate(entry.placed_tokens))

    def view(self, worker: WorkerId) -> WorkerView | None:
        entry = self._entries.get(worker)
        return None if entry is None else _view(entry)

    def views(self) -> list[WorkerView]:
        """Every live worker, by id, but those that neither beat nor answer."""
        return [_view(entry) for _, entry in sorted(self._entries.items()) if not entry.unresponsive]

    def pools(self) -> list[WorkerView]:
        """`views`, and behind them the decode workers that are away for a moment, as draining: no request is too large
        that one of those could hold."""
        silent = [entry.beat for entry in self._entries.values() if entry.unresponsive]
        lost = [lost.beat for worker, lost in sorted(self._lost.items()) if worker not in self._entries]
        away = [_view(_Entry(beat, 0.0)) for beat in (*silent, *lost) if beat.role == "decode"]
        return [*self.views(), *(replace(view, draining=True) for view in away)]

    def attempts(self) -> Iterator[tuple[WorkerBeat, AttemptProgress]]:
        """What live decode workers last said they hold."""
        for worker in sorted(self._entries):
            beat = self._entries[worker].beat
            if beat.role == "decode":
                for held in beat.attempts:
                    yield beat, held


def _view(entry: _Entry) -> WorkerView:
    beat = entry.beat
    view = WorkerView(
        worker=beat.worker,
        role=beat.role,
        incarnation=beat.incarnation,
        free_blocks=beat.free_blocks,
        held_back=beat.held_back,
        total_blocks=beat.total_blocks,
        block_sizes=beat.block_sizes,
        token_bytes=sum(beat.token_bytes),
        token_budget=beat.token_budget or DEFAULT_TOKEN_BUDGET,
        running=beat.running,
        waiting=beat.waiting,
        max_sequences=beat.max_sequences,
        queue_tokens=beat.queue_tokens,
        class_tokens=beat.class_tokens,
        step_model=beat.step_model,
        itl_target=beat.itl_target,
        kv=beat.kv,
        links=beat.links,
        numerics=beat.numerics,
        fingerprint=beat.fingerprint,
        draining=beat.draining,
        fake=beat.fake,
        rooms=beat.rooms,
        classes=beat.classes,
    )
    if not entry.placed_sequences:
        return view
    return replace(
        view,
        held_back=tuple(h + entry.placed_sequences for h in view.held_back),
        free_blocks=tuple(max(0, f - p) for f, p in zip(view.free_blocks, entry.placed_blocks, strict=False)),
        running=view.running + entry.placed_sequences,
        queue_tokens=view.queue_tokens + sum(entry.placed_tokens),
        class_tokens=tuple(n + p for n, p in zip(view.class_tokens, entry.placed_tokens, strict=False)),
        rooms=tuple(_less(room, entry) for room in view.rooms),
    )


def _less(room: ClassRoom, entry: _Entry) -> ClassRoom:
    """What is left of it beside what was placed since."""
    blocks = (b - p - entry.placed_sequences for b, p in zip(room.blocks, entry.placed_blocks, strict=False))
    return ClassRoom(room.sequences - entry.placed_sequences, tuple(blocks))
