"""What becomes of failed items, what items are called, and how one gets to run alone."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.batch.item_gate import RunGate
from services.batch.item_plan import seed_of
from services.batch.item_results import answered, failed, poisoned
from services.batch.item_rules import (
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    Fail,
    Poison,
    Retry,
    ends_the_run,
    first_epoch,
    judge,
    poison,
    request_id_of,
    runs_alone,
)
from shared.bus.bus import NO_RESPONDERS
from shared.contracts.errors import (
    BatonError,
    Cancelled,
    Conflict,
    ContextExceeded,
    DeadlineExceeded,
    Forbidden,
    Internal,
    InvalidInput,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    Unavailable,
    UnknownModel,
)
from shared.contracts.ids import BatchId, RequestId, TenantId
from shared.ingress.completion_body import Usage
from shared.text.stream_choice import StreamRules

ANN, BATCH = TenantId("ann"), BatchId("batch-1")


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("x"),
        ContextExceeded("x"),
        UnknownModel("x"),
        Forbidden("x"),
        Conflict("x"),
        Cancelled("x", code="purged"),
        DeadlineExceeded("x"),
    ],
)
def test_errors_of_the_item_are_its_result_at_once(error: BatonError) -> None:
    assert judge(error, losses=0, tries=0, faults=0, chance=0.5) == Fail(error)


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("x", retry_after_s=3.0),
        Unavailable("x", retry_after_s=3.0),
        Unavailable("x", retry_after_s=3.0, code=NO_RESPONDERS),
        QuotaExceeded("x", retry_after_s=3.0),
        Cancelled("x", retry_after_s=3.0, code="unlisted"),
    ],
)
def test_what_passes_is_waited_for_as_advised(error: BatonError) -> None:
    for tries in (0, 3, 500):
        assert judge(error, losses=0, tries=tries, faults=0, chance=0.0) == Retry(3.0)
        verdict = judge(error, losses=2, tries=tries, faults=0, chance=0.999)
        assert isinstance(verdict, Retry)
        assert 3.0 < verdict.pause_s < 3.75


def test_without_advice_the_pauses_grow_and_are_bounded() -> None:
    pauses = []
    for tries in range(2000):
        verdict = judge(Unavailable("x"), losses=0, tries=tries, faults=0, chance=0.0)
        assert isinstance(verdict, Retry)
        pauses.append(verdict.pause_s)
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (MIN_PAUSE_S, MAX_PAUSE_S)
    huge = judge(Overloaded("x", retry_after_s=1e9), losses=0, tries=0, faults=0, chance=0.0)
    assert huge == Retry(MAX_PAUSE_S)


@pytest.mark.parametrize("error", [Internal("x"), ProtocolError("x")])
def test_a_fault_of_ours_is_tried_a_few_times(error: BatonError) -> None:
    verdicts = [judge(error, losses=0, tries=faults, faults=faults, chance=0.0) for faults in range(3)]
    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Fail]


def test_the_third_death_of_a_worker_is_poison_whatever_the_error() -> None:
    for error in (Unavailable("x"), InvalidInput("x"), Internal("x")):
        assert isinstance(judge(error, losses=3, tries=0, faults=0, chance=0.0), Poison)
    assert isinstance(judge(Unavailable("x"), losses=2, tries=0, faults=0, chance=0.0), Retry)


def test_two_deaths_make_a_suspect_which_gets_one_more_run_alone() -> None:
    assert [runs_alone(losses) for losses in range(4)] == [False, False, True, True]
    assert [ends_the_run(losses, alone=False) for losses in range(4)] == [False, False, True, True]
    assert [ends_the_run(losses, alone=True) for losses in range(4)] == [False, False, False, True]


def test_a_claims_epochs_are_above_those_a_session_before_it_can_have_used() -> None:
    assert [first_epoch(claim) for claim in (1, 2, 3)] == [1, 17, 33]
    assert first_epoch(2) - first_epoch(1) > StreamRules().max_lost + StreamRules().max_moves


def test_request_ids_are_of_the_item_alone() -> None:
    one = request_id_of(ANN, BATCH, 1, "c1")
    assert one == request_id_of(ANN, BATCH, 1, "c1")
    assert one.startswith("req-")
    assert len(one) == 36
    others = {
        request_id_of(TenantId("bob"), BATCH, 1, "c1"),
        request_id_of(ANN, BatchId("batch-11"), 1, "c1"),
        request_id_of(ANN, BatchId("batch-1"), 11, "c1"),
        request_id_of(ANN, BATCH, 1, "c11"),
        request_id_of(TenantId("annb"), BatchId("atch-1"), 1, "c1"),
    }
    assert len(others | {one}) == 6
    assert seed_of(one) == seed_of(one) != seed_of(RequestId("req-x"))
    assert 0 <= seed_of(one) < 2**64


def test_results_have_the_forms_of_the_files() -> None:
    ok = answered("c1", RequestId("req-1"), {"id": "chatcmpl-1"}, Usage(10, 5, 3))
    assert (ok.ok, ok.prompt_tokens, ok.completion_tokens, ok.cached_tokens) == (True, 10, 5, 3)
    bad = failed("c1", RequestId("req-1"), ContextExceeded("too long", param="messages"))
    assert (bad.ok, bad.status_code, bad.error_code) == (False, 400, "context_length_exceeded")
    assert json.loads(bad.body)["error"]["param"] == "messages"
    assert bad.completion_tokens == bad.prompt_tokens == 0
    # words of the bus name hops of ours
    hidden = failed("c1", RequestId("req-1"), Unavailable("baton.v1.policy.admit: nobody listens", code=NO_RESPONDERS))
    assert "policy" not in hidden.error_message + hidden.body.decode()
    dead = poisoned("c1", RequestId("req-1"), poison(3))
    assert (dead.ok, dead.status_code, dead.body, dead.error_code) == (False, 0, b"", "poison")
    assert "3 times" in dead.error_message


async def test_who_wants_to_be_alone_waits_and_is_not_kept_waiting_by_newcomers() -> None:
    gate, order, leave = RunGate(), [], asyncio.Event()

    async def run(name: str, *, alone: bool) -> None:
        async with gate.entered(alone=alone):
            order.append(f"+{name}")
            await leave.wait()
            await asyncio.sleep(0)
            order.append(f"-{name}")

    tasks = [asyncio.create_task(run(name, alone=False)) for name in ("a", "b")]
    await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(run("suspect", alone=True)), asyncio.create_task(run("other suspect", alone=True))]
    await asyncio.sleep(0.01)
    tasks.append(asyncio.create_task(run("c", alone=False)))
    await asyncio.sleep(0.01)
    assert order == ["+a", "+b"]
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["+a", "+b", "-a", "-b", "+suspect", "-suspect", "+other suspect", "-other suspect", "+c", "-c"]


async def test_who_stops_waiting_to_be_alone_lets_the_others_in() -> None:
    gate, entered = RunGate(), asyncio.Event()
    async with gate.entered(alone=False):
        waiting = asyncio.create_task(gate.entered(alone=True).__aenter__())
        await asyncio.sleep(0.01)

        async def enter() -> None:
            async with gate.entered(alone=False):
                entered.set()

        newcomer = asyncio.create_task(enter())
        await asyncio.sleep(0.01)
        assert not entered.is_set()
        waiting.cancel()
        await asyncio.wait_for(newcomer, 5)
    async with gate.entered(alone=True):
        pass
