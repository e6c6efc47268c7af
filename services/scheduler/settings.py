"""What a scheduler is told at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.placement import HandoffCost
from services.scheduler.placer import TableLimits


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Seconds unless named otherwise."""

    pool: str = "default"
    scheduler_id: str = "scheduler-1"
    leader_ttl_s: float = 6.0
    beat_s: float = 1.0
    tick_s: float = 0.1
    worker_lease_s: float = 10.0
    ingress_lease_s: float = 10.0
    limits: TableLimits = field(default_factory=TableLimits)
    cost: HandoffCost = field(default_factory=HandoffCost)
