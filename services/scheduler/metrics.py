"""What a scheduler tells in metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from services.scheduler.effects import PlacingEnded
from services.scheduler.request_table import RequestTable
from services.scheduler.worker_registry import LostWorker, WorkerRegistry
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names
from shared.telemetry.metric import CLASSES, ROLES
from shared.telemetry.metrics import Metrics

LIMITED_S = 15.0
"""A limiter counts as active for so long after it turned a request away: a usual scrape interval."""
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Scheduler(Protocol):
    """What is read of a scheduler."""

    match_timeouts: int

    @property
    def table(self) -> RequestTable | None: ...

    @property
    def workers(self) -> WorkerRegistry: ...


class SchedulerMetrics:
    """Counts what happens, and reads the rest when somebody asks. `clock` is the scheduler's."""

    def __init__(self, metrics: Metrics, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._clock = clock
        self._table: RequestTable | None = None
        self._refusals: Counter[str] = Counter()
        metrics.before_scrape(self.read)

    def placing_ended(self, effect: PlacingEnded) -> None:
        """A try at placing is over."""
        attributes = effect.attributes
        reason = str(attributes.get(a.REASON, ""))
        if effect.outcome == "placed":
            klass, delay_s = str(attributes[a.CLASS]), float(attributes[a.QUEUE_S])
            if reason != "adopted":  # placed by an earlier leader, who counted it
                self._metrics.observe(names.QUEUE_DELAY, delay_s, **{"class": klass})
            self._metrics.inc(names.PLACEMENTS, path=str(attributes[a.PATH]), reason=reason)
        elif effect.outcome == "requeued":
            self._metrics.inc(names.REQUEUES, reason=retry_reason(reason))

    def worker_lost(self, lost: LostWorker) -> None:
        """A worker was given up."""
        self._metrics.inc(names.WORKERS_LOST, role=lost.role, reason=lost.reason)

    def read(self) -> None:
        """Bring gauges, and counters kept elsewhere, up to date."""
        metrics, table, views = self._metrics, self._scheduler.table, self._scheduler.workers.views()
        waiting = table.waiting_by_class if table is not None else {}
        for klass in CLASSES:
            metrics.set(names.QUEUED, waiting.get(klass, 0), **{"class": klass})
        for role in ROLES:
            metrics.set(names.LIVE_WORKERS, sum(view.role == role for view in views), role=role)
        metrics.set(names.LEADING, table is not None)
        metrics.set(names.TERM, 0 if table is None else table.term)
        metrics.set(names.PLACED, 0 if table is None else table.placed)
        limited = table is not None and self._clock() - table.limited_s < LIMITED_S
        metrics.set(names.LIMITER, limited, limiter="admission")
        metrics.total(names.MATCH_TIMEOUTS, self._scheduler.match_timeouts)
        self._count_refusals(table)

    def _count_refusals(self, table: RequestTable | None) -> None:
        """What came since the last look; a table lives for one term, and the next one counts from 0."""
        if table is not self._table:
            self._table, self._refusals = table, Counter()
        for reason, count in (table.refusals if table is not None else {}).items():
            self._metrics.inc(names.QUEUE_REFUSALS, count - self._refusals[reason], reason=reason)
            self._refusals[reason] = count


def retry_reason(reason: str) -> str:
    """A reason of our own, or a worker's error code such as `Overloaded/NoBlocks`, as `no_blocks`."""
    kind, _, code = reason.rpartition("/")
    return "conflict" if kind == "Conflict" else _CAPITAL.sub("_", code).lower()
