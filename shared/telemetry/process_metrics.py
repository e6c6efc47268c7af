"""What every process tells of itself: its build, its connection, what the bus and the traces lost."""

from __future__ import annotations

import platform

from shared.bus.nats_bus import NatsBus
from shared.settings.models import served_models
from shared.settings.sections import Settings
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics
from shared.telemetry.setup import Telemetry


def process_metrics(service: str, settings: Settings, bus: NatsBus, telemetry: Telemetry) -> Metrics:
    """The metrics of a service process."""
    metrics = Metrics(
        service, models=[model.name for model in served_models(settings)], tenant_labels=settings.metrics.tenant_labels
    )

    def read() -> None:
        stats = bus.stats
        metrics.set(names.BUS_CONNECTED, bus.connected)
        metrics.total(names.BUS_DROPPED, stats.undecodable, reason="undecodable")
        metrics.total(names.BUS_DROPPED, stats.expired, reason="expired")
        metrics.total(names.BUS_DROPPED, stats.refused, reason="refused")
        metrics.total(names.BUS_DROPPED, stats.handler_failures, reason="handler_failed")
        metrics.total(names.BUS_DROPPED, stats.slow_consumer, reason="slow_consumer")
        metrics.total(names.SPANS, telemetry.queue.ended)
        metrics.total(names.SPANS_DROPPED, telemetry.queue.dropped + telemetry.unsent, to="bus")
        metrics.total(names.SPANS_DROPPED, 0 if telemetry.otlp is None else telemetry.otlp.dropped, to="otlp")

    metrics.before_scrape(read)
    build_info(metrics, service)
    return metrics


def build_info(metrics: Metrics, service: str, *, numerics: str = "", fake: bool = False) -> None:
    """Say what runs in this process; `numerics` and `fake` are a worker's. A later word replaces an earlier one."""
    labels = {"service": service, "python": platform.python_version(), "numerics": numerics, "fake": str(fake).lower()}
    metrics.only(names.BUILD_INFO, 1, **labels)
