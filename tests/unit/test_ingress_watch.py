"""Which ingresses live."""

from __future__ import annotations

from services.policy.ingress_watch import FORGET_S, GONE_S, LEASE_S, QUIET_S, IngressWatch
from shared.contracts.ids import IngressId, RequestId

A, B = IngressId("gateway-a"), IngressId("gateway-b")


def test_one_that_beats_is_neither_asked_nor_lost() -> None:
    watch = IngressWatch()
    for now in range(30):
        watch.heard(A, float(now))
        assert watch.quiet(now + 0.5) == []
        assert not watch.lost(A, now + 0.5)


def test_silence_is_asked_about_and_in_the_end_is_loss() -> None:
    watch = IngressWatch()
    watch.heard(A, 0.0)
    assert watch.quiet(QUIET_S + 0.1) == [A]
    assert not watch.lost(A, LEASE_S)
    assert watch.lost(A, LEASE_S + 0.1)
    assert watch.quiet(LEASE_S + 0.1) == []
    watch.heard(A, LEASE_S + 1.0)
    assert not watch.lost(A, LEASE_S + 1.0)


def test_one_that_nobody_listens_for_is_lost_sooner_but_not_at_once() -> None:
    watch = IngressWatch()
    watch.heard(A, 0.0)
    watch.nobody_listens(A, 2.0)
    watch.nobody_listens(A, 2.0 + GONE_S - 0.1)  # the first time counts
    assert not watch.lost(A, 2.0 + GONE_S - 0.1)
    assert watch.all_lost(2.0 + GONE_S) == {A}
    watch.heard(A, 6.0)  # the bus was away, not the ingress
    watch.nobody_listens(A, 8.0)
    assert not watch.lost(A, 8.0 + GONE_S - 0.1)


def test_one_only_heard_of_has_its_lease_from_then_on() -> None:
    watch = IngressWatch()
    assert not watch.lost(B, 1000.0)
    watch.heard_of(B, 1000.0)
    watch.heard_of(B, 1005.0)
    assert watch.lost(B, 1000.0 + LEASE_S + 0.1)
    assert watch.all_lost(1000.0 + FORGET_S + 1.0) == set()


def test_what_an_ingress_runs_is_known_while_it_beats() -> None:
    watch, one, other = IngressWatch(), RequestId("one"), RequestId("other")
    assert watch.names(A, one, 0.0) is None
    watch.heard(A, 0.0)
    assert watch.names(A, one, 0.0) is None
    watch.beat(A, [one], 1.0)
    watch.heard(A, 2.0)
    assert (watch.names(A, one, 2.0), watch.names(A, other, 2.0)) == (True, False)
    assert watch.names(A, one, 1.1 + QUIET_S) is None
    assert not watch.lost(A, 2.0 + QUIET_S)
    watch.beat(A, [other], 4.0)
    assert (watch.names(A, one, 4.0), watch.names(A, other, 4.0)) == (False, True)
