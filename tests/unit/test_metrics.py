"""Metrics: the table, closed labels, registries, and the page that is written from the table."""

from __future__ import annotations

import logging
import random
import re

import pytest

from shared.telemetry import metric_docs
from shared.telemetry import metric_names as names
from shared.telemetry.metric import ALL, MAX_TENANTS, Metric
from shared.telemetry.metrics import MAX_TOGETHER, Metrics

NAME = re.compile(r"(vllm:|baton_)[a-z0-9_]+")


def series(metrics: Metrics) -> list[str]:
    return [line for line in metrics.exposition()[0].decode().splitlines() if not line.startswith("#")]


def ours(metrics: Metrics) -> list[str]:
    return [line for line in series(metrics) if not line.startswith("process_")]


@pytest.mark.parametrize("metric", names.TABLE, ids=lambda metric: metric.name)
def test_the_table_is_sound(metric: Metric) -> None:
    assert NAME.fullmatch(metric.name)
    assert metric.services
    assert set(metric.services) <= set(ALL)
    assert metric.meaning.endswith(".")
    assert metric.kind != "counter" or not metric.name.endswith("_total")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    for values in metric.labels.values():
        assert len(set(values)) == len(values)


def test_names_are_unique_and_time_is_in_seconds() -> None:
    exposed = [metric.exposed for metric in names.TABLE]
    assert len(set(exposed)) == len(exposed)
    assert all(metric.name.endswith("_seconds") for metric in names.TABLE if metric.unit == "s")


def test_vllm_names_have_vllm_edges() -> None:
    assert names.TTFT.buckets[:3] == (0.001, 0.005, 0.01)
    assert names.TTFT.buckets[-2:] == (640.0, 2560.0)
    assert names.ITL.buckets[0] == 0.01
    assert names.ITL.buckets[-1] == 80.0
    assert names.E2E.buckets[0] == 0.3
    assert names.E2E.buckets[-1] == 7680.0
    assert names.ITERATION_TOKENS.buckets[-1] == 16384
    assert names.PARAMS_N.buckets == (1, 2, 5, 10, 20)


def test_the_page_is_what_the_table_says() -> None:
    page = metric_docs.PAGE.read_text()
    assert metric_docs.with_table(page) == page, "run python -m shared.telemetry.metric_docs"


@pytest.mark.parametrize("service", ALL)
def test_every_service_shows_its_metrics_before_anything_happened(service: str) -> None:
    metrics = Metrics(service, models=["m"])
    metrics.bind(engine="decode-1")
    text = metrics.exposition()[0].decode()
    for metric in names.of_service(service):
        shown = "tenant" not in metric.labels
        assert (f"# TYPE {metric.name}" in text) == shown, metric.name
    assert 'engine=""' not in text


def test_what_strangers_send_adds_no_series() -> None:
    # Given a gateway that has counted every value there can be
    metrics = Metrics("gateway", models=["m"])
    metrics.inc(names.REFUSED, reason="something new")
    metrics.observe(names.TTFT, 0.1, model_name="nobody serves this")
    before = len(series(metrics))
    # When thousands of names come
    rng = random.Random(7)
    for _ in range(2000):
        name = f"model-{rng.random()}"
        metrics.observe(names.TTFT, 0.1, model_name=name)
        metrics.inc(names.REFUSED, reason=name)
    # Then there are as many series as before, and nothing is remembered of the names
    assert len(series(metrics)) == before
    assert metrics.value(names.REFUSED, reason="other") == 2001
    assert metrics.value(names.TTFT, model_name="other") == 2001
    assert len(metrics._children) < 500


def test_every_model_has_its_series_from_the_first_scrape_on() -> None:
    found = [line for line in series(Metrics("scheduler", models=["m", "n"])) if line.startswith("baton_placed")]
    assert found == ['baton_placed_requests{model_name="m"} 0.0', 'baton_placed_requests{model_name="n"} 0.0']


def test_what_was_counted_before_an_engine_had_its_id_stays_apart() -> None:
    metrics = Metrics("decode", models=["m"])
    metrics.inc(names.GENERATION_TOKENS, 1)
    metrics.bind(engine="decode-1")
    metrics.inc(names.GENERATION_TOKENS, 2)
    assert metrics.value(names.GENERATION_TOKENS) == 2


def test_an_engine_is_known_by_its_worker_from_the_moment_it_has_one() -> None:
    metrics = Metrics("decode", models=["m"])
    assert not [line for line in series(metrics) if line.startswith("vllm:")]
    metrics.bind(engine="decode-1")
    metrics.inc(names.GENERATION_TOKENS, 5)
    found = [line for line in series(metrics) if line.startswith("vllm:generation")]
    assert found == ['vllm:generation_tokens_total{engine="decode-1",model_name="m"} 5.0']


def test_a_counter_kept_elsewhere_is_followed_and_survives_its_beginning_anew() -> None:
    metrics = Metrics("scheduler")
    for value in (3, 5, 5, 2):
        metrics.total(names.MATCH_TIMEOUTS, value)
    assert metrics.value(names.MATCH_TIMEOUTS) == 7


def test_facts_told_by_labels_are_one_series() -> None:
    metrics = Metrics("decode")
    for numerics in ("", "a", "b"):
        metrics.only(names.BUILD_INFO, 1, service="decode", python="3", numerics=numerics, fake="false")
    found = [line for line in series(metrics) if line.startswith("baton_build_info")]
    assert found == ['baton_build_info{fake="false",numerics="b",python="3",service="decode"} 1.0']


def test_tenants_are_told_apart_only_when_asked_and_within_a_bound() -> None:
    silent, told = Metrics("policy"), Metrics("policy", tenant_labels=True)
    for metrics in (silent, told):
        for number in range(MAX_TENANTS + 50):
            metrics.inc(names.TENANT_TOKENS, 1, tenant=f"t{number}", kind="prompt")
    assert not [line for line in series(silent) if "tenant=" in line]
    found = [line for line in series(told) if line.startswith("baton_tenant_tokens")]
    assert len(found) == MAX_TENANTS + 1
    assert told.value(names.TENANT_TOKENS, tenant="t0", kind="prompt") == 1
    assert 'baton_tenant_tokens_total{kind="prompt",tenant="other"} 50.0' in found


def test_a_reader_that_fails_spoils_nothing(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("scheduler", models=["m"])
    metrics.before_scrape(lambda: 1 / 0)  # type: ignore[arg-type]
    metrics.before_scrape(lambda: metrics.set(names.PLACED, 4))
    with caplog.at_level(logging.CRITICAL):
        assert 'baton_placed_requests{model_name="m"} 4.0' in series(metrics)


def test_a_metric_of_another_service_is_a_fault_of_ours() -> None:
    with pytest.raises(KeyError):
        Metrics("policy").inc(names.GENERATION_TOKENS)


def test_openmetrics_when_asked_for() -> None:
    metrics = Metrics("gateway", models=["m"])
    text, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert not [line for line in ours(metrics) if "_created" in line]


@pytest.mark.parametrize(
    "accept",
    [
        "",
        # Prometheus 2 and 3 as they ask
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4",
        "text/plain;version=1.0.0;escaping=underscores",
    ],
)
def test_names_are_the_same_in_every_format(accept: str) -> None:
    text = Metrics("gateway", models=["m"]).exposition(accept)[0].decode()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert any(line.startswith("vllm:") for line in samples)
    assert not [line for line in samples if line.startswith("vllm_")]


def test_values_entered_together_count_as_one_by_one() -> None:
    values = [0.0, 0.001, 0.0011, 0.3, 5.0, 1e9]
    together, alone = Metrics("decode"), Metrics("decode")
    together.observe_all(names.STEP_SECONDS, values)
    for value in values:
        alone.observe(names.STEP_SECONDS, value)

    def told(metrics: Metrics) -> list[str]:
        return [line for line in metrics.exposition()[0].decode().splitlines() if names.STEP_SECONDS.name in line]

    assert told(together) == told(alone)
    assert together.value(names.STEP_SECONDS) == len(values)


def test_what_a_recorder_took_is_told_at_once() -> None:
    values = [0.001 * number for number in range(MAX_TOGETHER + 5)]
    metrics, alone = Metrics("gateway", models=["m", "n"]), Metrics("gateway", models=["m", "n"])
    assert metrics.recorder(names.ITL, model_name="n") is metrics.recorder(names.ITL, model_name="n")
    for value in values:
        metrics.recorder(names.ITL, model_name="n").add(value)
        alone.observe(names.ITL, value, model_name="n")
    told = [[line for line in series(one) if line.startswith(names.ITL.name)] for one in (metrics, alone)]
    assert told[0] == told[1]
    metrics.recorder(names.ITL, model_name="m").add(1.0)
    assert metrics.value(names.ITL, model_name="m") == 1
    assert metrics.value(names.ITL, model_name="n") == len(values)
