"""What one request enters into the metrics: once, with the times its client felt."""

from __future__ import annotations

import pytest

from shared.contracts.errors import Cancelled, Unavailable
from shared.contracts.ids import Epoch
from shared.ingress.request_metrics import RequestMetrics, count_refused, read_in_flight
from shared.telemetry import metric_names as names
from shared.telemetry.metric import Metric
from shared.telemetry.metrics import Metrics
from shared.text.stream_effects import End

WHOLE = (
    names.E2E,
    names.QUEUE_TIME,
    names.PREFILL_TIME,
    names.DECODE_TIME,
    names.INFERENCE_TIME,
    names.REQUEST_PROMPT_TOKENS,
    names.REQUEST_GENERATION_TOKENS,
)


def request(arrived: float = 100.0) -> tuple[Metrics, RequestMetrics]:
    metrics = Metrics("gateway", models=["m"])
    made = RequestMetrics(metrics, "m", arrived=arrived, epoch=Epoch(1))
    made.admitted(1, 16)
    made.submitted(Epoch(1))
    return metrics, made


def total(metrics: Metrics, metric: Metric) -> float:
    metrics.exposition()  # what waits together goes in
    return metrics.registry.get_sample_value(f"{metric.name}_sum", {"model_name": "m"}) or 0.0


def test_the_parts_of_a_request_add_up() -> None:
    metrics, one = request()
    one.placed(101.0)
    one.tokens(103.0, 1)
    one.tokens(103.5, 1)
    one.tokens(104.5, 2)
    one.ended(104.5, End("length"), prompt_tokens=7)
    one.settled(104.75)
    assert {m.name: total(metrics, m) for m in (names.TTFT, *WHOLE)} == {
        names.TTFT.name: 3.0,
        names.E2E.name: 4.5,
        names.QUEUE_TIME.name: 1.0,
        names.PREFILL_TIME.name: 2.0,
        names.DECODE_TIME.name: 1.5,
        names.INFERENCE_TIME.name: 3.5,
        names.REQUEST_PROMPT_TOKENS.name: 7.0,
        names.REQUEST_GENERATION_TOKENS.name: 4.0,
    }
    assert (metrics.value(names.ITL), total(metrics, names.ITL)) == (3, 1.5)
    assert metrics.value(names.REQUEST_SUCCESS, finished_reason="length") == 1
    assert metrics.registry.get_sample_value("baton_settlement_lag_seconds_sum") == 0.25


def test_a_loss_resets_nothing_and_is_counted() -> None:
    metrics, one = request()
    one.placed(101.0)
    one.tokens(102.0, 3)
    one.submitted(Epoch(2))  # its worker died
    one.placed(105.0)
    one.tokens(106.0, 1)
    one.tokens(107.0, 1)
    one.ended(107.0, End("stop"), prompt_tokens=1)
    assert metrics.value(names.TTFT) == metrics.value(names.QUEUE_TIME) == 1
    assert total(metrics, names.TTFT) == 2.0
    assert total(metrics, names.QUEUE_TIME) == 1.0
    assert total(metrics, names.DECODE_TIME) == 5.0
    assert metrics.value(names.EPOCHS_RAISED) == metrics.value(names.RESUMES) == 1


def test_a_loss_before_the_first_token_is_no_resume() -> None:
    metrics, one = request()
    one.submitted(Epoch(2))
    one.tokens(101.0, 1)
    assert (metrics.value(names.EPOCHS_RAISED), metrics.value(names.RESUMES)) == (1, 0)


def test_a_frame_may_overtake_the_word_of_the_place() -> None:
    for placed in (None, 105.0):
        metrics, one = request()
        one.tokens(102.0, 1)
        if placed is not None:
            one.placed(placed)
        one.tokens(106.0, 1)
        one.ended(106.0, End("length"), prompt_tokens=1)
        assert total(metrics, names.QUEUE_TIME) == 2.0
        assert total(metrics, names.PREFILL_TIME) == 0.0


@pytest.mark.parametrize(
    ("end", "finished", "family", "reason"),
    [
        (End("cancelled", Cancelled("x", code="slow_client")), "abort", names.CANCELLED, "slow_client"),
        (End("error", Unavailable("x", code="worker_lost")), "error", names.FAILED, "worker_lost"),
        (End("error", Unavailable("x", code="never heard of")), "error", names.FAILED, "other"),
    ],
)
@pytest.mark.parametrize("tokens", [0, 2])
def test_what_did_not_end_well_is_not_entered(
    end: End, finished: str, family: Metric, reason: str, tokens: int
) -> None:
    metrics, one = request()
    one.placed(101.0)
    one.tokens(102.0, tokens)
    one.ended(103.0, end, prompt_tokens=5)
    assert metrics.value(names.TTFT) == (1 if tokens else 0)
    assert [metrics.value(metric) for metric in WHOLE] == [0] * len(WHOLE)
    assert metrics.value(names.REQUEST_SUCCESS, finished_reason=finished) == 1
    assert metrics.value(family, reason=reason) == 1


def test_a_settlement_that_could_not_be_stored() -> None:
    metrics, one = request()
    one.unsettled()
    assert metrics.value(names.SETTLEMENTS_LOST) == 1
    assert metrics.value(names.SETTLEMENT_LAG) == 0


def test_requests_in_flight_and_refused() -> None:
    metrics = Metrics("gateway", models=["m", "n"])
    read_in_flight(metrics, ["m", "n"], ["n", "n"])
    assert metrics.value(names.IN_FLIGHT, model_name="n") == 2
    assert metrics.value(names.IN_FLIGHT, model_name="m") == 0
    count_refused(metrics, Unavailable("x", code="shutting_down"))
    assert metrics.value(names.REFUSED, reason="shutting_down") == 1
