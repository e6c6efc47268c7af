"""What workers, scheduler, policy and index count, as it happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.policy.metrics import PolicyMetrics, RunningGauge
from services.policy.tenants import TenantRecord
from services.scheduler.effects import PlacingEnded
from services.scheduler.ingresses import IngressRegistry
from services.scheduler.metrics import SchedulerMetrics, retry_reason
from services.scheduler.request_table import RequestTable
from services.scheduler.worker_registry import LostWorker, WorkerRegistry
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import QuotaExceeded, from_wire
from shared.contracts.ids import BlockTag, Incarnation, RequestId, TenantId, Term, WorkerId
from shared.contracts.messages import Settle
from shared.contracts.parts import GroupTags
from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.worker_metrics import refusal_reason
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names
from shared.telemetry.metric import Metric
from shared.telemetry.metrics import Metrics
from tests.pipeline.worker_support import attempt, cell, options, signed_grant, until

PROMPT = list(range(100, 130))


def value(metrics: Metrics, metric: Metric, **labels: str) -> float:
    metrics.exposition()  # as a scrape does: readers first
    return metrics.value(metric, **labels)


# ---------------------------------------------------------------------------------------------- workers


async def test_a_hand_off_is_counted_once_at_both_ends(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        await c.handed_off(PROMPT)
        await c.driver.idle([c.decode_id, c.prefill_id])
        decode, prefill = c.decode.shell.metrics, c.prefill.shell.metrics
        await until(lambda: decode.value(names.HANDOFF_SECONDS) == 1)
        assert {o: decode.value(names.HANDOFFS, outcome=o) for o in ("done", "local", "closed")} == {
            "done": 1,
            "local": 0,
            "closed": 0,
        }
        moved = sum(-(-29 // g.block_size) * g.span_bytes for g in c.decode.shell.core.facts.layout.groups)
        assert decode.value(names.HANDOFF_BYTES) == moved
        assert prefill.value(names.HANDOFF_SOURCES_ENDED, reason="done") == 1
        # tokens: the prompt once, at decode; what was computed where it was computed
        assert (decode.value(names.PROMPT_TOKENS), decode.value(names.GENERATION_TOKENS)) == (30, 12)
        assert prefill.value(names.COMPUTED_TOKENS) == 29
        assert decode.value(names.COMPUTED_TOKENS) == 12
        assert decode.value(names.ITERATION_TOKENS) == decode.value(names.STEP_SECONDS) >= 12


async def test_gauges_follow_what_a_worker_holds(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        metrics, engine = c.decode.shell.metrics, {"engine": "decode-1"}
        size = c.decode.shell.core.facts.layout.total_bytes
        assert value(metrics, names.HEADROOM) == value(metrics, names.POOL_BYTES) == size
        slow = SamplingParams(max_tokens=200, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=slow)
        await until(lambda: value(metrics, names.RUNNING, **engine) == 1)
        assert value(metrics, names.RESERVATIONS) == 1
        assert 0 < value(metrics, names.KV_USAGE, **engine) < 1
        assert value(metrics, names.HEADROOM) < size
        cancel = m.Cancel(attempt=attempt(), reason="client")
        await c.driver.bus.request(subjects.decode(c.decode_id, "cancel"), cancel, m.Cancelled, timeout_s=5)
        await until(lambda: value(metrics, names.HEADROOM) == size)
        assert value(metrics, names.RUNNING, **engine) == value(metrics, names.RESERVATIONS) == 0


@pytest.mark.parametrize("how", ["fails", "lease"])
async def test_a_hand_off_given_up_says_why(tmp_path: Path, how: str) -> None:
    async with cell(options(tmp_path)) as c:
        metrics = c.decode.shell.metrics
        if how == "fails":

            def fail(plan: StepPlan) -> StepOutput:
                raise RuntimeError("no")

            c.prefill.shell.core.engine._runner.run = fail  # type: ignore[method-assign]
            await c.handed_off(PROMPT)
        else:
            await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id, lease_s=0.5)
            await c.driver.final()
        reason = "prefill_failed" if how == "fails" else "prefill_lease"
        assert metrics.value(names.HANDOFF_FAILURES, reason=reason) == 1
        assert metrics.value(names.HANDOFFS, outcome="local") == 1
        assert metrics.value(names.LEASE_LOSSES, holder="prefill") == (how == "lease")
        await c.driver.idle([c.decode_id, c.prefill_id])


async def test_refusals_and_prefix_hits(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        metrics = c.decode.shell.metrics
        await c.driver.reserve(c.decode_id, PROMPT, grant=signed_grant("req-other"))
        await c.driver.reserve(c.decode_id, PROMPT, sampling=SamplingParams(max_tokens=5000), a=attempt("req-b"))
        assert metrics.value(names.RESERVATIONS_REFUSED, reason="grant") == 1
        assert metrics.value(names.RESERVATIONS_REFUSED, reason="never_fits") == 1
        # Given a block that is tagged, the next prompt finds it
        tags = (GroupTags(0, tuple(BlockTag(bytes([i]) * 16) for i in range(7))),)
        await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-c"), tags=tags)
        await c.driver.final("req-c")
        for _ in range(200):
            if (await c.decode.shell.call(lambda batcher: batcher.pool.counts))[0].cached == 7:
                break
            await asyncio.sleep(0.01)
        await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-d"), tags=tags)
        assert metrics.value(names.PREFIX_QUERIES) == 60
        assert metrics.value(names.PREFIX_HITS) == 28


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("Overloaded/NoBlocks", "no_blocks"),
        ("Overloaded/NoSlot", "no_slot"),
        ("Overloaded/NeverFits", "never_fits"),
        ("ContextExceeded/context_length_exceeded", "never_fits"),
        ("Overloaded/overloaded", "draining"),
        ("Conflict/lower_term", "fenced"),
        ("Forbidden/grant_invalid", "grant"),
        ("Cancelled/cancelled", "cancelled"),
        ("ProtocolError/protocol_error", "invalid"),
    ],
)
def test_reasons_of_refusals_are_in_the_table(code: str, reason: str) -> None:
    found = refusal_reason(from_wire(m.ErrorInfo(code=code, message="")))
    assert found == reason
    assert reason in names.RESERVATIONS_REFUSED.labels["reason"]


# ---------------------------------------------------------------------------------------------- scheduler


class Idle:
    """A scheduler that does not lead."""

    match_timeouts = 3
    table: RequestTable | None = None
    workers = WorkerRegistry("default", 10.0)


class Leading(Idle):
    """One that does, as soon as it has a table."""


def ended(outcome: str, **attributes: str | float) -> PlacingEnded:
    return PlacingEnded(RequestId("req-a"), outcome, {getattr(a, name): value for name, value in attributes.items()})


def test_placements_retries_and_losses() -> None:
    metrics = Metrics("scheduler", models=["m"])
    seen = SchedulerMetrics(metrics, Idle(), lambda: 0.0)
    seen.placing_ended(ended("placed", PATH="handed_off", REASON="estimate", CLASS="batch", QUEUE_S=2.5))
    seen.placing_ended(ended("placed", PATH="local", REASON="adopted", CLASS="batch", QUEUE_S=0.0))
    seen.placing_ended(ended("requeued", REASON="Overloaded/NoBlocks"))
    seen.placing_ended(ended("dropped"))
    seen.worker_lost(LostWorker(WorkerId("decode-1"), Incarnation(1), "decode", "gone"))
    assert value(metrics, names.PLACEMENTS, path="handed_off", reason="estimate") == 1
    assert value(metrics, names.PLACEMENTS, path="local", reason="adopted") == 1
    assert value(metrics, names.REQUEUES, reason="no_blocks") == 1
    assert value(metrics, names.WORKERS_LOST, role="decode", reason="gone") == 1
    assert value(metrics, names.MATCH_TIMEOUTS) == 3
    # what an earlier leader placed was measured by it
    assert value(metrics, names.QUEUE_DELAY, **{"class": "batch"}) == 1


def test_refusals_go_on_over_a_change_of_leader() -> None:
    metrics, scheduler = Metrics("scheduler", models=["m"]), Leading()
    SchedulerMetrics(metrics, scheduler, lambda: 100.0)
    for term, counts in ((1, (1, 2)), (2, (5,)), (3, (0,))):
        scheduler.table = RequestTable(
            term=Term(term), now=0.0, registry=scheduler.workers, ingresses=IngressRegistry(10.0)
        )
        for count in counts:
            scheduler.table.refusals["queue_full"] = count
            scheduler.table.limited_s = 90.0 if count else float("-inf")
            metrics.exposition()
    assert metrics.value(names.QUEUE_REFUSALS, reason="queue_full") == 7
    assert metrics.value(names.LIMITER, limiter="admission") == 0
    scheduler.table.limited_s = 90.0
    assert value(metrics, names.LIMITER, limiter="admission") == 1
    assert (value(metrics, names.LEADING), value(metrics, names.TERM)) == (1, 3)


@pytest.mark.parametrize(
    ("given", "reason"),
    [("no_room", "no_room"), ("Overloaded/NoSlot", "no_slot"), ("Conflict/older_attempt", "conflict")],
)
def test_reasons_of_retries_are_in_the_table(given: str, reason: str) -> None:
    assert retry_reason(given) == reason
    assert reason in names.REQUEUES.labels["reason"]


# ---------------------------------------------------------------------------------------------- policy


def test_a_limiter_is_active_for_a_scrape_interval() -> None:
    now = [100.0]
    metrics = Metrics("policy")
    seen = PolicyMetrics(metrics, lambda: now[0])
    assert value(metrics, names.LIMITER, limiter="quota") == 0
    seen.answered("")
    seen.answered(QuotaExceeded.default_code)
    assert value(metrics, names.ADMISSIONS, outcome="granted") == 1
    assert value(metrics, names.ADMISSIONS, outcome="rate_limit_exceeded") == 1
    assert value(metrics, names.LIMITER, limiter="quota") == 1
    now[0] += 20.0
    assert value(metrics, names.LIMITER, limiter="quota") == 0


class Known:
    """Tenants and what of theirs runs."""

    def __init__(self, running: dict[str, dict[str, int]]) -> None:
        self._running = running

    async def tenants(self) -> list[TenantRecord]:
        return [TenantRecord(id=TenantId(name)) for name in self._running]

    async def running(self, tenant: TenantId) -> dict[str, int]:
        return self._running[tenant]


async def test_what_runs_is_told_by_tenant_where_tenants_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.telemetry.metrics.MAX_TENANTS", 2)
    running = {"acme": {"one": 2, "": 1}, "idle": {}, "late": {"one": 3}, "later": {"one": 4}}
    known: Any = Known(running)
    metrics, hidden = Metrics("policy", tenant_labels=True), Metrics("policy")
    for _ in range(2):
        await RunningGauge(metrics, known, known).refresh()
    told = [value(metrics, names.TENANT_RUNNING, tenant=tenant) for tenant in ("acme", "idle", "other")]
    assert told == [3, 0, 7]
    running["acme"] = running["late"] = {}
    await RunningGauge(metrics, known, known).refresh()
    assert [value(metrics, names.TENANT_RUNNING, tenant=tenant) for tenant in ("acme", "other")] == [0, 4]
    await RunningGauge(hidden, known, None).refresh()  # type: ignore[arg-type]
    assert not hidden.exposes(names.TENANT_RUNNING)


def test_a_settlement_counts_its_tokens_once() -> None:
    metrics = Metrics("policy", tenant_labels=True)
    seen = PolicyMetrics(metrics)
    settle = Settle(
        attempt=attempt(),
        grant=signed_grant("req-a"),
        prompt_tokens=5,
        completion_tokens=3,
        cached_tokens=2,
        finish="stop",
    )
    seen.booked(TenantId("acme"), settle, again=False)
    seen.booked(TenantId("acme"), settle, again=True)
    assert value(metrics, names.SETTLEMENTS, outcome="booked") == 1
    assert value(metrics, names.SETTLEMENTS, outcome="already_booked") == 1
    assert [value(metrics, names.BILLED_TOKENS, kind=k) for k in ("prompt", "cached", "completion")] == [5, 2, 3]
    assert value(metrics, names.TENANT_TOKENS, tenant="acme", kind="completion") == 3
