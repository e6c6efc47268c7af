"""A worker that accepted a request and lost the blocks for it before it began: the request stands where it stood."""

from __future__ import annotations

from services.scheduler.effects import AskReserve
from services.scheduler.record import State
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.ids import IngressId, RequestId
from shared.contracts.parts import AttemptProgress
from tests.unit.scheduler_support import Bench, attempt, no_room, reserved, submit

FULL = {"free_blocks": (0,)}
SHORT = 20  # tokens: less than a block, so that no match is asked for


def listing(*attempts: Attempt) -> tuple[AttemptProgress, ...]:
    return tuple(AttemptProgress(a, 1) for a in attempts)


def placed_at_d1(**limits: object) -> Bench:
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.beat("d1")
    bench.submit(submit("r", SHORT))
    bench.reserve(reserved())
    assert state(bench) == State.PLACED
    bench.told.clear()
    bench.effects.clear()
    return bench


def revoke(bench: Bench, one: Attempt, worker: str = "d1") -> None:
    bench.beat(worker, attempts=listing(one), revoked=(one,), **FULL)


def state(bench: Bench, name: str = "r") -> State | None:
    record = bench.table.record(RequestId(name))
    return record.state if record is not None else None


def test_it_waits_at_its_worker_when_nobody_else_has_room_and_is_adopted_when_it_runs() -> None:
    bench = placed_at_d1()
    one = attempt("r", 1, 1)
    for _ in range(3):
        revoke(bench, one)
        assert state(bench) == State.QUEUED
        bench.tick(0.5)
    assert bench.count(AskReserve) == 0, "where it waits it begins by itself"
    assert bench.cancels() == []
    bench.beat("d1", attempts=listing(one), **FULL)
    assert state(bench) == State.PLACED
    assert bench.table.queued == 0
    assert bench.cancels() == []


def test_it_stands_before_those_that_came_later() -> None:
    bench = placed_at_d1()
    bench.now = 5.0
    bench.beat("d1", attempts=listing(attempt("r", 1, 1)), **FULL)
    bench.submit(submit("later", SHORT))
    revoke(bench, attempt("r", 1, 1))
    bench.beat("d2")
    ask = bench.reserve(reserved())
    assert (ask.worker, ask.message.attempt) == ("d2", attempt("r", 1, 2))
    record = bench.table.record(RequestId("r"))
    assert record is not None
    assert record.arrival_s == 0.0
    assert bench.reserve(reserved()).message.attempt.request_id == "later"


def test_another_worker_that_has_room_takes_it_and_the_first_is_told_to_drop_it() -> None:
    bench = placed_at_d1()
    revoke(bench, attempt("r", 1, 1))
    bench.beat("d2")
    # While the other is asked, the first goes on holding it.
    revoke(bench, attempt("r", 1, 1))
    assert bench.cancels() == []
    ask = bench.reserve(reserved())
    assert (ask.worker, ask.message.attempt) == ("d2", attempt("r", 1, 2))
    assert [(e.attempt, e.decode_worker) for e in bench.told] == [(attempt("r", 1, 2), "d2")]
    revoke(bench, attempt("r", 1, 1))
    assert bench.cancels() == [("d1", attempt("r", 1, 1))]
    assert state(bench) == State.PLACED


def test_a_refusal_elsewhere_leaves_it_with_the_first_and_no_dispatch_is_named_twice() -> None:
    bench = placed_at_d1()
    revoke(bench, attempt("r", 1, 1))
    bench.beat("d2")
    bench.reserve(no_room())
    assert state(bench) == State.QUEUED
    bench.beat("d1", attempts=listing(attempt("r", 1, 1)), **FULL)
    assert state(bench) == State.PLACED
    assert bench.cancels() == []
    # taken back again, the next try is a new one
    revoke(bench, attempt("r", 1, 1))
    bench.beat("d2")
    assert bench.reserve(reserved()).message.attempt == attempt("r", 1, 3)


def test_the_worker_dies_while_it_waits() -> None:
    bench = placed_at_d1()
    revoke(bench, attempt("r", 1, 1))
    bench.lose("d1")
    bench.beat("d2")
    assert bench.reserve(reserved()).worker == "d2"


def test_a_new_leader_takes_it_back_too() -> None:
    bench = Bench(term=2, gather_s=1.0)
    revoke(bench, attempt("r", 1, 1))
    bench.submit(submit("r", SHORT))
    revoke(bench, attempt("r", 1, 1))
    assert state(bench) == State.QUEUED
    bench.now = 2.0
    bench.beat("d2")
    ask = bench.reserve(reserved())
    assert ask.worker == "d2"
    assert ask.message.attempt.dispatch > 2**16


def test_what_the_ingress_gave_up_is_cancelled_where_it_waits() -> None:
    bench = placed_at_d1()
    revoke(bench, attempt("r", 1, 1))
    for number in (1, 2):
        bench.now += 4.0
        message = m.GatewayBeat(ingress_id=IngressId("gateway-1"), number=number, requests=())
        bench.take(bench.table.ingress_beat(bench.now, message))
    assert state(bench) is None
    revoke(bench, attempt("r", 1, 1))
    assert bench.cancels() == [("d1", attempt("r", 1, 1))]
