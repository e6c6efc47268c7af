"""The frames of `./baton top`, without a gateway."""

from __future__ import annotations

from typing import Any

from services.cli.top_view import Snapshot, cluster_lines, frame, gauge
from shared.telemetry.trace_buffer import TraceSummary


def worker(name: str = "decode-1", role: str = "decode", free: int = 60, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "role": role,
        "running": 2,
        "max_sequences": 32,
        "waiting": 1,
        "queue_tokens": 700,
        "free_blocks": [free],
        "total_blocks": [100],
        "fake": False,
        "draining": False,
        "age_s": 0.3,
    } | more


def cluster(**more: Any) -> dict[str, Any]:
    scheduler = {"id": "s-1", "term": 2, "queued": 3, "running": 2, "age_s": 0.1}
    return {
        "gateway": {"id": "gateway-1", "requests": 5, "draining": False},
        "checks": {"policy": True, "scheduler": True},
        "scheduler": scheduler
        | {
            "queued_by_class": {"batch": 1, "interactive": 2},
            "tenants": [{"tenant": "acme", "class": "interactive", "weight": 4.0, "waiting": 2, "running": 1}],
        },
        "ingresses": [{"id": "gateway-1", "requests": 5, "age_s": 0.2}, {"id": "batch-1", "requests": 9, "age_s": 0.4}],
        "workers": [worker(classes=["batch"]), worker("prefill-1", "prefill", 100, fake=True)],
    } | more


def summary(number: int, tenant: str = "demo") -> TraceSummary:
    return TraceSummary(
        f"{number:032x}", f"req-{number:032x}", 90.0, "m", tenant, "local", "ok", 1.5, 0.25, 10, 0, 4, 9, ("gateway",)
    )


def test_a_frame_shows_queues_workers_and_requests() -> None:
    shown = Snapshot(100.0, cluster(), [summary(n) for n in range(50)])
    lines = frame("http://h:1", shown, "", (100, 24), 100.0)
    text = "\n".join(lines)
    for words in (
        "http://h:1",
        "ready   gateway-1 holds 5 requests",
        "3 queued (interactive 2, batch 1)  2 running  term 2",
        "waiting    acme 2 interactive (weight 4)",
        "████········ 40/100",
        "  batch",
        "············ 0/100",
        "2/32",
        "fake",
        "batch-1",
        "250ms",
    ):
        assert words in text, words
    assert len(lines) == 24
    assert max(map(len, lines)) <= 100


def test_a_terminal_of_80_columns_shows_every_worker_whole() -> None:
    names = {"decode-0123456789ab", "prefill-0123456789ab"}
    workers = [
        worker(name, name.partition("-")[0], fake=True, free_blocks=[3000], total_blocks=[4096]) for name in names
    ]
    lines = frame("http://h:1", Snapshot(100.0, cluster(workers=workers), [summary(1)]), "", (80, 24), 100.0)
    assert not any("…" in line for line in lines if not line.startswith("scheduler"))
    assert all(len(line) <= 80 for line in lines)
    assert {line.split()[0] for line in lines if "1096/4096" in line and line.endswith("fake")} == names
    assert any(line.startswith("REQUEST") and line.endswith("STATUS") for line in lines)


def test_every_size_of_terminal_is_kept_to() -> None:
    shown = Snapshot(100.0, cluster(), [summary(n) for n in range(50)])
    for size in ((1, 1), (20, 5), (40, 10), (79, 11), (200, 60)):
        lines = frame("http://h:1", shown, "a fault that is told", size, 100.0)
        assert len(lines) <= size[1]
        assert all(len(line) <= size[0] for line in lines)


def test_what_is_missing_is_said() -> None:
    silent = cluster(scheduler=None, workers=[], checks={"policy": True, "decode": False})
    text = "\n".join(cluster_lines(silent))
    for words in ("NOT READY: decode", "scheduler  not heard", "no worker was heard"):
        assert words in text
    assert frame("http://h:1", None, "nothing answers", (80, 24), 0.0)[1] == "! nothing answers"
    old = frame("http://h:1", Snapshot(90.0, cluster(), []), "nothing answers", (80, 24), 100.0)
    assert "! below: what was said 10 s ago" in old
    assert "no requests yet" in old


def test_a_terminal_is_never_told_what_to_do() -> None:
    evil = "\x1b[2J\x1b]0;title\x07\nname"
    shown = Snapshot(100.0, cluster(workers=[worker(evil)]), [summary(1, tenant=evil)])
    for line in frame(evil, shown, evil, (120, 40), 100.0):
        assert line.isprintable(), repr(line)


def test_gauges() -> None:
    assert [gauge(used, 100, 4) for used in (0, 1, 50, 99, 100)] == ["····", "█···", "██··", "███·", "████"]
    assert gauge(0, 0, 4) == "····"
