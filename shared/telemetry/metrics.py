"""The metrics of one process: a registry built from the table in `metric_names`, and nothing besides.

    metrics = Metrics("decode", models=["m"])
    metrics.bind(engine=worker_id)
    metrics.inc(names.HANDOFF_BYTES, result.num_bytes)
    metrics.before_scrape(lambda: metrics.set(names.RESERVATIONS, len(table)))

Counting costs about a microsecond and may be done on any thread. What changes all the time is read only when somebody
asks: `before_scrape`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from shared.telemetry.metric import MAX_TENANTS, OTHER, Metric
from shared.telemetry.metric_names import of_service

log = logging.getLogger("baton.telemetry")

Family = Counter | Gauge | Histogram

MAX_TOGETHER = 256
"""Values a recorder keeps: to enter so many holds nothing up for longer than some fifty microseconds."""


class Recorder:
    """Values on their way into a histogram, which get there together: at the next exposition, or when they are many."""

    __slots__ = ("_enter", "_values")

    def __init__(self, enter: Callable[[Sequence[float]], None]) -> None:
        self._enter = enter
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """Enter a value."""
        self._values.append(value)
        if len(self._values) >= MAX_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Hand on what was entered."""
        if self._values:
            values, self._values = self._values, []
            self._enter(values)


class Metrics:
    """The registry of one process.

    Args:
        service: its name in `subjects.SERVICES`.
        models: names of served models: the values of `model_name`; the first is meant where none is given.
        tenant_labels: expose metrics that tell tenants apart.
    """

    def __init__(self, service: str, *, models: Iterable[str] = (), tenant_labels: bool = False) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._models: tuple[str, ...] = ()
        self._bound: dict[str, str] = {}
        self._tenants: set[str] = set()
        self._readers: list[Callable[[], None]] = []
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._children: dict[tuple[str, tuple[tuple[str, str], ...]], Family] = {}
        self._families: dict[str, Family | None] = {}
        self._recorders: dict[tuple[str, tuple[tuple[str, str], ...]], Recorder] = {}
        self._zeroed = False
        self.serve_models(models)
        for metric in of_service(service):
            hidden = "tenant" in metric.labels and not tenant_labels
            self._families[metric.name] = None if hidden else _family(metric, self.registry)
        self._metrics = of_service(service)
        ProcessCollector(registry=self.registry)

    def bind(self, **labels: str) -> None:
        """Values this process gives its open labels, such as `engine`, from now on."""
        self._bound.update(labels)
        self._children = {}  # they were found with the values before
        self._zeroed = False

    def serve_models(self, models: Iterable[str]) -> None:
        """The values of `model_name` from now on; any other is `other`. The first is meant where none is given."""
        self._models = tuple(models)
        self.bind(model_name=self._models[0] if self._models else "")

    def before_scrape(self, read: Callable[[], None]) -> None:
        """Call `read` before every exposition: it sets gauges from what is true then."""
        self._readers.append(read)

    def inc(self, metric: Metric, amount: float = 1.0, /, **labels: str) -> None:
        """Add to a counter."""
        child = self._child(metric, labels)
        if isinstance(child, Counter):
            child.inc(amount)

    def total(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Bring a counter up to `value`, which somebody else counts; one that fell has begun anew."""
        key = (metric.name, tuple(labels.values()))
        before = self._totals.get(key, 0.0)
        self._totals[key] = value
        self.inc(metric, value - before if value >= before else value, **labels)

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        child = self._child(metric, labels)
        if isinstance(child, Gauge):
            child.set(value)

    def exposes(self, metric: Metric) -> bool:
        """Whether this process has the metric: those that tell tenants apart only if it is to."""
        return self._families[metric.name] is not None

    def set_by_tenant(self, metric: Metric, values: Mapping[str, float], /) -> None:
        """Set a gauge of every tenant there is; those that are not told apart are one, with their sum."""
        sums: dict[str, float] = {}
        for tenant, value in values.items():
            told = self._allowed(metric, "tenant", tenant)
            sums[told] = sums.get(told, 0.0) + value
        for tenant, total in sums.items():
            self.set(metric, total, tenant=tenant)

    def only(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge to one series, dropping those it had: for facts told by labels."""
        family = self._families[metric.name]
        if isinstance(family, Gauge):
            family.clear()
            self._children = {key: child for key, child in self._children.items() if key[0] != metric.name}
            self.set(metric, value, **labels)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Enter a value into a histogram."""
        child = self._child(metric, labels)
        if isinstance(child, Histogram):
            child.observe(value)

    def observe_all(self, metric: Metric, values: Sequence[float], /, **labels: str) -> None:
        """Enter many values into a histogram: a fraction of the time that each by itself takes."""
        child = self._child(metric, labels)
        if isinstance(child, Histogram):
            places = Counts(bisect_left(child._upper_bounds, value) for value in values)
            for place, count in places.items():
                child._buckets[place].inc(count)
            child._sum.inc(sum(values))

    def recorder(self, metric: Metric, /, **labels: str) -> Recorder:
        """For a histogram into which something is entered all the time; one a series, on one thread."""
        key = (metric.name, tuple(labels.items()))
        if (known := self._recorders.get(key)) is None:
            known = self._recorders[key] = Recorder(lambda values: self.observe_all(metric, values, **labels))
        return known

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text Prometheus reads, and its content type; by `accept` the classic or the OpenMetrics format."""
        if not self._zeroed:
            self._zeroed = True
            self._zero()
        self._read()
        encode, content_type = choose_encoder(accept)
        if isinstance(encode, functools.partial):
            # None of our names needs escaping, and the library's turns the colon of `vllm:` into an underscore.
            encode = functools.partial(encode, escaping=ALLOWUTF8)
        return encode(self.registry), content_type

    def value(self, metric: Metric, **labels: str) -> float:
        """A counter's or gauge's value, or how many values a histogram has, as a scrape would show it; for tests."""
        self._read()
        self._flush()
        name = {"counter": metric.exposed, "gauge": metric.name, "histogram": f"{metric.name}_count"}[metric.kind]
        given = {label: self._allowed(metric, label, labels.get(label)) for label in metric.labels}
        return self.registry.get_sample_value(name, given) or 0.0

    def _read(self) -> None:
        self._flush()
        for read in self._readers:
            try:
                read()
            except Exception:
                log.exception("a metric could not be read")

    def _flush(self) -> None:
        for recorder in self._recorders.values():
            recorder.flush()

    def _child(self, metric: Metric, labels: dict[str, str]) -> Family | None:
        key = (metric.name, tuple(labels.items()))
        if (known := self._children.get(key)) is not None:
            return known
        family = self._families[metric.name]
        if family is None:
            return None
        values = {label: self._allowed(metric, label, labels.get(label)) for label in metric.labels}
        child: Family = family.labels(**values) if values else family
        # Keys hold what callers give, which may be anything; what is kept for speed must stay bounded.
        if all(values[label] == labels[label] for label in labels):
            self._children[key] = child
        return child

    def _allowed(self, metric: Metric, label: str, value: str | None) -> str:
        if value is None:
            return self._bound.get(label, "")
        if label == "model_name":
            return value if value in self._models else OTHER
        if label == "tenant":
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(value)
            return value if value in self._tenants else OTHER
        closed = metric.labels[label]
        return value if not closed or value in closed else OTHER

    def _zero(self) -> None:
        """Make every series there can be of closed labels: a rate needs a first value to rise from."""
        for metric in self._metrics:
            closed = {label: values for label, values in metric.labels.items() if values}
            if "model_name" in metric.labels and self._models:
                closed["model_name"] = self._models
            if any(label not in closed and label not in self._bound for label in metric.labels):
                continue
            for values in itertools.product(*closed.values()):
                self._child(metric, dict(zip(closed, values, strict=True)))


def _family(metric: Metric, registry: CollectorRegistry) -> Family:
    labels = tuple(metric.labels)
    if metric.kind == "counter":
        return Counter(metric.name, metric.meaning, labels, registry=registry)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.meaning, labels, registry=registry)
    return Histogram(metric.name, metric.meaning, labels, buckets=metric.buckets, registry=registry)
