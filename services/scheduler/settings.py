"""What a scheduler is told at start, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.placer import TableLimits
from shared.settings.models import only_model
from shared.settings.sections import Settings


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
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


def scheduler_config(settings: Settings, scheduler_id: str) -> SchedulerConfig:
    """The scheduler's part of the settings. Raises SettingsError when they name several models: each has its own."""
    section = settings.scheduler
    return SchedulerConfig(
        pool=only_model(settings).pool,
        scheduler_id=scheduler_id,
        leader_ttl_s=section.lease_s,
        beat_s=section.beat_s,
        worker_lease_s=section.worker_timeout_s,
        ingress_lease_s=section.worker_timeout_s,
        limits=TableLimits(
            queue_bound=section.max_queued,
            slo_ttft_s={
                "interactive": section.slo_ttft_s,
                "analysis": section.analysis_slo_ttft_s,
                "batch": section.batch_slo_ttft_s,
            },
            max_wait_s={
                "interactive": section.interactive_max_wait_s,
                "analysis": section.analysis_max_wait_s,
                "batch": section.batch_max_wait_s,
            },
            lease_s=section.worker_timeout_s,
        ),
    )
