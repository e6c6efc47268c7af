"""Events to ingresses, the forecast, ingress leases and tombstones: the small cores beside the request table."""

from __future__ import annotations

import pytest

from services.scheduler import forecast
from services.scheduler.forecast import Ahead, TurnClock
from services.scheduler.ingresses import IngressRegistry
from services.scheduler.outbox import NUMBER_SHIFT, Event, Outbox
from services.scheduler.tombstones import Tombstones
from shared.bus.nats_lease import REVISIONS_S
from shared.contracts.ids import Epoch, Incarnation, IngressId, RequestId, Term, WorkerId
from shared.contracts.message import decode, encode
from shared.contracts.messages import GatewayBeat, Placed, WorkerLost
from shared.contracts.parts import StepModel
from tests.unit.scheduler_support import attempt, view

A, B = IngressId("a"), IngressId("b")


def lost(number: int) -> Event:
    return WorkerLost(number=number, worker=WorkerId("w"), incarnation=Incarnation(1))


def test_events_go_one_at_a_time_in_order_and_again_until_seen() -> None:
    outbox = Outbox(Term(3), resend_s=1.0)
    for _ in range(2):
        outbox.add(A, lost)
    outbox.add(B, lost)
    first = (3 << NUMBER_SHIFT) + 1
    assert [(i, e.number) for i, e in outbox.due(0.0)] == [(A, first), (B, first + 2)]
    assert outbox.due(0.9) == []
    assert [(i, e.number) for i, e in outbox.due(1.0)] == [(A, first), (B, first + 2)]
    outbox.seen(A, first)
    outbox.drop(B)
    assert [(i, e.number) for i, e in outbox.due(1.0)] == [(A, first + 1)]
    outbox.seen(A, first + 7)
    outbox.seen(IngressId("nobody"), 1)
    assert len(outbox) == 0


def test_an_ingress_that_was_given_up_leaves_nothing_and_gets_higher_numbers_when_it_returns() -> None:
    outbox = Outbox(Term(1))
    outbox.add(A, lost)
    before = outbox.due(0.0)[0][1].number
    outbox.drop(A)
    assert outbox._lanes == {}
    outbox.add(A, lost)
    assert outbox.due(0.0)[0][1].number > before


def test_numbers_of_a_later_term_are_above() -> None:
    old, new = Outbox(Term(1)), Outbox(Term(2))
    for _ in range(1000):
        old.add(A, lost)
    old.seen(A, (1 << NUMBER_SHIFT) + 999)
    new.add(A, lost)
    assert new.due(0.0)[0][1].number > old.due(0.0)[0][1].number


def test_events_of_a_term_of_this_century_can_be_sent() -> None:
    # terms come from the wall clock, so numbers made of them are large
    century = Term(int(4.1e9 * REVISIONS_S))
    outbox = Outbox(century)
    for _ in range(1000):
        outbox.add(A, lost)
    event = outbox.due(0.0)[0][1]
    assert decode(encode(event), WorkerLost) == event
    placed = attempt("r", dispatch=century << 16)
    assert decode(encode(Placed(number=1, attempt=placed, term=century, decode_worker=WorkerId("w"))), Placed).term > 0


def test_the_forecast_takes_the_worst_of_tokens_turns_and_memory() -> None:
    views = [view("d1")]  # 100 blocks of 32 are free
    rate = forecast.prefill_rate(views)
    assert rate == pytest.approx(128 / (0.025 + 0.0012 * 128 + 0.0005))
    own_s = 0.025 + 0.0012 * 100 + 0.0005
    fast, slow = TurnClock(turn_s=0.1, num_slots=100.0), TurnClock(turn_s=2.0, num_slots=100.0)
    by_tokens = forecast.predict_ttft_s(views, Ahead(num_tokens=900, turns=3), fast, 100)
    assert by_tokens == pytest.approx(900 / rate + own_s)
    first_s = 0.025 + 0.0012 + 0.0005
    by_turns = forecast.predict_ttft_s(views, Ahead(turns=30, num_slots=3_200.0), slow, 1)
    assert by_turns == pytest.approx(60.0 + first_s)
    by_memory = forecast.predict_ttft_s(views, Ahead(turns=3, num_slots=13_200.0), slow, 1)
    assert by_memory == pytest.approx(10_000 * 2.0 / 100 + first_s)
    full = [view("d1", free_blocks=(10,), held_back=(10,))]
    assert forecast.predict_ttft_s(full, Ahead(num_slots=100.0), slow, 1) == pytest.approx(2.0 + first_s)


def test_the_forecast_knows_that_a_long_prompt_attends_to_more() -> None:
    model = StepModel(base_s=0.0, token_s=0.001, sequence_s=0.0, context_s=1e-6)
    (long,) = views = [view("d1", step_model=model, token_budget=1000)]
    found = forecast.predict_ttft_s(views, Ahead(), TurnClock(), 2000)
    assert found == pytest.approx(2.0 + 1e-6 * 2000 * 2001 / 2)
    assert found == forecast.prompt_s(long, 2000)
    assert forecast.predict_ttft_s([], Ahead(num_tokens=9), TurnClock(), 9) == 0.0


def test_retry_after_is_whole_clamped_and_jittered() -> None:
    assert forecast.retry_after_s(1.0, 5.0, 0.0) == 1.0
    assert forecast.retry_after_s(30.0, 10.0, 0.0) == 20.0
    assert forecast.retry_after_s(30.0, 10.0, 0.999) == 24.0
    assert forecast.retry_after_s(1e9, 0.0, 0.5) == 600.0


def test_the_turn_clock_measures_only_while_others_wait() -> None:
    clock = forecast.TurnClock(weight=0.5)
    clock.placed(0.0, others_waited=True, num_slots=7.0)
    assert clock.slot_s == 0.0
    clock.placed(2.0, others_waited=True, num_slots=100.0)
    assert clock.turn_s == 2.0
    assert clock.slot_s == 2.0 / 100
    clock.placed(6.0, others_waited=False)
    clock.placed(100.0, others_waited=True)
    assert clock.turn_s == 2.0
    clock.placed(104.0, others_waited=True)
    assert clock.turn_s == 3.0


def test_an_ingress_lists_and_leaves() -> None:
    ingresses = IngressRegistry(lease_s=10.0)
    r1, r2 = RequestId("r1"), RequestId("r2")
    assert ingresses.unlisted(GatewayBeat(ingress_id=A, number=1), [r1]) == set()
    ingresses.heard(A, 0.0)
    assert ingresses.unlisted(GatewayBeat(ingress_id=A, number=1, requests=(r2,)), [r1, r2]) == set()
    assert ingresses.unlisted(GatewayBeat(ingress_id=A, number=1, requests=(r2,)), [r1, r2]) == set()  # stale
    assert ingresses.unlisted(GatewayBeat(ingress_id=A, number=2, requests=(r2,)), [r1, r2]) == {r1}
    ingresses.heard(A, 5.0)
    assert ingresses.known() == [A]
    assert ingresses.expire(14.9) == []
    assert ingresses.expire(15.0) == [A]


def test_tombstones_remember_for_a_while() -> None:
    ended = Tombstones(remember_s=60.0)
    ended.add(RequestId("a"), Epoch(2), dropped=True, now=0.0)
    ended.add(RequestId("b"), Epoch(1), dropped=False, now=1.0)
    assert ended.epoch(RequestId("a")) == 2
    assert ended.was_dropped(attempt("a", 1))
    assert not ended.was_dropped(attempt("a", 3))
    assert not ended.was_dropped(attempt("b", 1))
    ended.expire(60.0)
    assert ended.epoch(RequestId("a")) is None
    assert ended.epoch(RequestId("b")) == 1
