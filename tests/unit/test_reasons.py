"""The sentences a trace is told in, and the rows that the console and the terminal share."""

from __future__ import annotations

import pytest

from shared.contracts.errors import PURGED, ContextExceeded, InvalidInput, to_wire
from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names
from shared.telemetry import reasons
from shared.telemetry.metric import Metric
from shared.telemetry.reasons import failed, why
from shared.telemetry.trace_rows import Fact, length_s, trace_rows

MS = 1_000_000


def span(name: str, status: str = "", **attributes: str | int | float | bool) -> SpanRecord:
    named = {getattr(a, key): value for key, value in attributes.items()}
    return SpanRecord("t" * 32, "1", "", name, "service", 0, MS, status, named)


PLACED = {"STATUS": "placed", "DECODE_WORKER": "decode-1", "CANDIDATES": 2, "LOCAL_S": 0.48, "HANDED_OFF_S": 0.21}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            span("scheduler.place", **PLACED, PATH="handed_off", REASON="estimate", PREFILL_WORKER="prefill-1"),
            ("handed off to prefill-1", "210ms handed off", "480ms local", "chosen from 2 workers"),
        ),
        (
            span("scheduler.place", **PLACED, PATH="local", REASON="no_prefill_worker", MATCHED_TOKENS=64),
            ("no prefill worker could begin at once", "480ms", "decode-1 holds 64 tokens"),
        ),
        (
            span("scheduler.place", **PLACED, PATH="local", REASON="estimate", EPOCH=2),
            ("attempt 2: an earlier one was lost",),
        ),
        (span("scheduler.place", STATUS="requeued", REASON="no_room"), ("back in the queue", "had blocks")),
        (span("scheduler.place", STATUS="requeued", REASON="Overloaded/NoBlocks"), ("too few free blocks",)),
        (span("scheduler.submit", QUEUE_POSITION=3, PREDICTED_TTFT_S=0.5), ("3 ahead", "predicted in 500ms")),
        (span("scheduler.submit", STATUS="overloaded"), ("refused", "longer than is bearable")),
        (
            span("policy.admit", STATUS="ok", CLASS="interactive", RESERVED_TOKENS=120, BUDGET_S=60.0),
            ("admitted as interactive", "120 tokens reserved", "60 s"),
        ),
        (
            span("policy.admit", STATUS="rate_limit_exceeded", REASON="tokens_per_minute"),
            ("refused", "tokens a minute are used up (tokens_per_minute)"),
        ),
        (
            span("policy.admit", STATUS="ok", CLASS="batch", RESERVED_TOKENS=0, BUDGET_S=86400.0),
            ("admitted as batch: nothing reserved", "86400 s"),
        ),
        (span("policy.settle", STATUS="ok", REASON="already_booked"), ("nothing was charged twice",)),
        (
            span("policy.settle", STATUS="ok", PROMPT_TOKENS=20, COMPLETION_TOKENS=60, RESERVED_TOKENS=120),
            ("80 of 120 reserved tokens charged",),
        ),
        (span("policy.settle", STATUS="ok", PROMPT_TOKENS=20, COMPLETION_TOKENS=60, RESERVED_TOKENS=0), ("80 tokens",)),
        (
            span("index.match", STATUS="ok", REASON="found", MATCHED_BLOCKS=2, BLOCKS=18, HOLDERS=1),
            ("2 blocks of 18", "1 worker"),
        ),
        (span("index.match", STATUS="ok", REASON="nothing_held"), ("no worker holds the beginning",)),
        (span("decode.reserve", PROMPT_TOKENS=40, CACHED_TOKENS=32), ("blocks reserved; 32 of 40 tokens cached",)),
        (span("decode.reserve", ERROR_CODE="Overloaded/NoSlot"), ("refused", "no free slot")),
        (
            span(
                "handoff.pull", BYTES=3 * 2**20, BLOCKS=5, PREFILL_WORKER="p", TRANSPORT="shared_memory", MISMATCHES=1
            ),
            ("3.0MiB in 5 blocks from p through shared memory", "1 block failed the digest"),
        ),
        (span("handoff.pull", REASON="digest_mismatch"), ("given up", "arrived damaged")),
        (
            span("prefill.run", COMPUTED_TOKENS=599, CHUNKS=2, REASON="done"),
            ("599 tokens", "2 chunks", "has all of it"),
        ),
        (span("prefill.run", REASON="released:digest_mismatch"), ("released:digest_mismatch",)),
        (span("decode.run", FAKE=True, FINISH="stop", COMPLETION_TOKENS=9), ("made up", "9 tokens", "ended: stop")),
        (span("decode.run", REASON="prefill_failed:Internal/engine_error"), ("hand-off given up", "no usable output")),
        (span("handoff.pull", REASON="pull_failed: OSError"), ("given up: copying the KV failed",)),
        (span("gateway.stream", LOST_WORKERS=1, REPLAYS=2), ("1 worker lost", "2 times")),
        (span("gateway.request", TTFT_S=0.25, EPOCH=2, PROMPT_TOKENS=9, CACHED_TOKENS=4), ("attempt 2", "250ms")),
        (span("batch.item", "error", STATUS="worker_lost"), ("failed: too many workers were lost",)),
        (span("gateway.request", "error", STATUS="invalid_api_key", HTTP_STATUS=401), ("not valid", "HTTP 401")),
        (span("anything", "error", REASON="odd_word"), ("failed: odd_word",)),
    ],
)
def test_reasons_in_words(told: SpanRecord, words: tuple[str, ...]) -> None:
    said = " | ".join(why(told))
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        (reasons.LOCAL_WORDS, (names.PLACEMENTS,)),
        (reasons.HANDOFF_WORDS, (names.HANDOFF_FAILURES,)),
        (reasons.FREE_WORDS, (names.HANDOFF_SOURCES_ENDED,)),
        (reasons.CODE_WORDS, (names.REFUSED, names.FAILED, names.CANCELLED, names.REQUEUES, names.QUEUE_REFUSALS)),
    ],
)
def test_every_reason_that_is_counted_has_a_sentence(words: dict[str, str], metrics: tuple[Metric, ...]) -> None:
    counted = {reason for metric in metrics for reason in metric.labels["reason"]}
    assert counted - words.keys() - {"other"} == set()


def test_every_way_to_place_and_to_refuse_is_counted_by_its_own_name() -> None:
    assert set(names.PLACEMENTS.labels["reason"]) == set(reasons.LOCAL_WORDS)
    # what a worker's "never", a purge and the door end a request with
    ends = {to_wire(error).code.rpartition("/")[2] for error in (ContextExceeded("x"), InvalidInput("x"))}
    assert ends | {PURGED, "queue_full", "slo"} <= set(names.QUEUE_REFUSALS.labels["reason"])


def test_a_span_that_decided_nothing_says_nothing() -> None:
    assert why(span("gateway.stream")) == ()
    assert why(span("index.extend", STATUS="ok", BLOCKS=3)) == ()


@pytest.mark.parametrize("name", ["scheduler.place", "policy.admit", "index.match", "handoff.pull", "gateway.request"])
def test_attributes_of_another_build_do_no_harm(name: str) -> None:
    odd = SpanRecord(
        "t" * 32, "1", "", name, "s", 0, MS, "", {a.LOCAL_S: "text", a.BYTES: "x", a.REASON: 7, a.EPOCH: True}
    )
    assert all(isinstance(sentence, str) for sentence in why(odd))


def test_what_counts_as_failed() -> None:
    assert failed(span("x", "error"))
    assert failed(span("policy.admit", STATUS="rate_limit_exceeded"))
    assert failed(span("scheduler.place", STATUS="refused"))
    assert failed(span("decode.reserve", ERROR_CODE="Overloaded/NoSlot"))
    assert not failed(span("scheduler.place", STATUS="requeued"))
    assert not failed(span("scheduler.place", STATUS="placed"))
    assert not failed(span("gateway.stream"))


def test_rows_lie_on_one_axis_with_facts_for_reading() -> None:
    spans = [
        SpanRecord("t" * 32, "2", "1", "child", "decode", 150 * MS, 250 * MS, "", {a.BYTES: 2048, a.FAKE: True}),
        SpanRecord("t" * 32, "1", "", "root", "gateway", 100 * MS, 600 * MS, "", {a.TENANT: "x", a.TTFT_S: 0.25}),
    ]
    root, child = trace_rows(spans)
    assert (root.depth, child.depth) == (0, 1)
    assert child.start_s == pytest.approx(0.05)
    assert child.duration_s == pytest.approx(0.1)
    assert length_s([root, child]) == pytest.approx(0.5)
    assert root.facts == (Fact("ttft", "250ms"),)
    assert child.facts == (Fact("bytes", "2.0KiB"), Fact("fake", "true"))
    assert trace_rows([]) == []
