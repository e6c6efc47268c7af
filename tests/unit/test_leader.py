"""Leadership of a pool: when a scheduler may lead, and that no term is led twice."""

from __future__ import annotations

from services.scheduler.leader import Change, Leadership
from shared.contracts.ids import Term


def test_a_term_starts_is_renewed_and_stops_before_the_lease_can_end() -> None:
    leader = Leadership(ttl_s=6.0, margin_s=1.0)
    assert leader.answered(0.0, None) == []
    assert leader.answered(1.0, 7) == [Change.STARTED]
    assert leader.answered(3.0, 7) == []
    assert leader.tick(7.9) == []
    assert leader.tick(8.0) == [Change.STOPPED]  # five seconds after it asked
    assert leader.tick(9.0) == []
    assert leader.term is None


def test_a_stopped_term_is_given_up_and_never_led_again() -> None:
    """Its requests are forgotten, and ingresses send them again only when they see a higher term."""
    leader = Leadership(ttl_s=6.0, margin_s=1.0)
    leader.answered(0.0, 7)
    leader.tick(10.0)  # the process was frozen; the lease in NATS may still be its own
    assert leader.answered(10.0, 7) == [Change.RELEASE]
    assert leader.term is None
    assert leader.answered(11.0, 9) == [Change.STARTED]


def test_another_leader_ends_it() -> None:
    leader = Leadership()
    leader.answered(0.0, 7)
    assert leader.seen(Term(7)) == []
    assert leader.seen(Term(8)) == [Change.STOPPED]
    assert leader.seen(Term(9)) == []
    leader.answered(20.0, 10)
    assert leader.answered(21.0, None) == [Change.STOPPED]
    assert leader.answered(30.0, 12) == [Change.STARTED]
    assert leader.answered(31.0, 14) == [Change.STOPPED, Change.STARTED]
