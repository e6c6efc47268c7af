"""`./baton trace`: the list and the waterfall."""

from __future__ import annotations

from services.cli.waterfall import WIDTH, draw_bar, list_table, waterfall
from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry.trace_buffer import summarize
from shared.telemetry.trace_rows import in_tree_order
from shared.telemetry.units import seconds

MS = 1_000_000


def span(name: str, span_id: str, parent: str, start_ms: int, end_ms: int, service: str = "gateway", **attributes):  # type: ignore[no-untyped-def]
    named = {getattr(a, key): value for key, value in attributes.items()}
    return SpanRecord("t" * 32, span_id, parent, name, service, start_ms * MS, end_ms * MS, "", named)


SPANS = [
    span("gateway.request", "1", "", 0, 1000, REQUEST_ID="req-" + "a" * 32, MODEL="m", TENANT="demo", TTFT_S=0.25),
    span("policy.admit", "2", "1", 5, 10, "policy"),
    span("scheduler.submit", "3", "1", 10, 60, "scheduler", QUEUE_S=0.001),
    span("index.match", "4", "3", 12, 20, "prefix-cache-index", MATCHED_BLOCKS=3),
    span("decode.run", "5", "3", 60, 990, "decode", BYTES=3 * 2**20, REASON="x" * 120, PATH="handed_off"),
]


def test_children_follow_their_parents_and_orphans_are_roots() -> None:
    orphan = span("late", "9", "gone", 1, 2)
    assert [(s.name, depth) for s, depth in in_tree_order([*reversed(SPANS), orphan])] == [
        ("gateway.request", 0),
        ("policy.admit", 1),
        ("scheduler.submit", 1),
        ("index.match", 2),
        ("decode.run", 2),
        ("late", 0),
    ]


def test_the_waterfall_fits_its_width_and_shows_what_matters() -> None:
    text = waterfall(SPANS)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    for part in ("gateway.request", "index.match", "matched_blocks=3", "bytes=3.0MiB", "ttft=250ms", "queue=1.0ms"):
        assert part in text


def test_bars() -> None:
    assert draw_bar(0, 10, 10, 10) == "█" * 10
    assert draw_bar(5, 10, 10, 10) == "·····█████"
    assert draw_bar(10, 10, 10, 10) == "·········█"
    assert len(draw_bar(3, 4, 1_000_000, 50)) == 50


def test_the_list() -> None:
    summary = summarize(SPANS)
    assert summary is not None
    table = list_table([summary], now=13.0)
    head, line = table.splitlines()
    assert line.split() == ["a" * 12, "13s", "m", "demo", "handed_off", "0", "0", "0", "250ms", "1.00s", "ok"]
    assert len(head) <= WIDTH
    assert list_table([], 0.0) == "no requests yet"


def test_a_narrow_terminal_keeps_times_and_status() -> None:
    summary = summarize(SPANS)
    assert summary is not None
    head, line = list_table([summary], 13.0, 80).splitlines()
    assert head.split() == ["REQUEST", "AGE", "TENANT", "PATH", "PROMPT", "OUT", "TTFT", "TOTAL", "STATUS"]
    assert line.split() == ["a" * 12, "13s", "demo", "handed_off", "0", "0", "250ms", "1.00s", "ok"]
    assert "TTFT" in list_table([summary], 13.0, 60)
    assert head.index("AGE") + 3 == line.index("13s") + 3


def test_durations_are_short() -> None:
    assert [seconds(v) for v in (0.00001, 0.0123, 0.25, 1.5, 120.0)] == ["0.0ms", "12.3ms", "250ms", "1.50s", "120s"]
