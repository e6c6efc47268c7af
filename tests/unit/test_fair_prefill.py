"""Deficit round robin over tenants, by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.ids import TenantId
from shared.engine.fair_prefill import DeficitRoundRobin, PrefillWant
from tests.unit.batcher_support import make_batcher, make_spec


def want(seq_id: str, num_tokens: int, weight: float = 1.0) -> PrefillWant:
    """A want of the tenant named by the first letter."""
    return PrefillWant(seq_id, TenantId(seq_id[0]), weight, num_tokens)


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    fair = DeficitRoundRobin(quantum=4)
    assert fair.share([want("a1", 10), want("a2", 10), want("a3", 10)], 25) == {"a1": 10, "a2": 10, "a3": 5}


def test_a_turn_cut_short_goes_on_in_the_next_step() -> None:
    fair = DeficitRoundRobin(quantum=8)
    both = [want("a1", 100), want("b1", 100)]
    assert fair.share(both, 5) == {"a1": 5}
    assert fair.share(both, 5) == {"a1": 3, "b1": 2}
    assert fair.share(both, 8) == {"b1": 6, "a1": 2}


def test_a_tenant_whose_wants_are_met_saves_nothing_up() -> None:
    fair = DeficitRoundRobin(quantum=100)
    for _ in range(50):
        assert fair.share([want("a1", 1), want("b1", 1)], 10) == {"a1": 1, "b1": 1}
    shares = fair.share([want("a1", 1000), want("b1", 1000)], 400)
    assert shares == {"a1": 200, "b1": 200}


def test_who_went_away_starts_again_without_credit_or_turn() -> None:
    fair = DeficitRoundRobin(quantum=10)
    assert fair.share([want("a1", 100), want("b1", 100)], 4) == {"a1": 4}
    assert fair.share([want("b1", 100)], 4) == {"b1": 4}
    assert fair.share([want("b1", 100), want("a1", 100)], 12) == {"b1": 6, "a1": 6}


@given(
    steps=st.lists(
        st.tuples(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=8), st.integers(0, 60)),
        max_size=8,
    ),
    quantum=st.integers(1, 50),
    weight=st.sampled_from([0.05, 0.5, 1.0, 3.0]),
)
def test_the_budget_is_used_up_and_nobody_gets_more_than_asked(
    steps: list[tuple[list[tuple[str, int]], int]], quantum: int, weight: float
) -> None:
    fair = DeficitRoundRobin(quantum)
    for asked, budget in steps:
        wants = [
            want(f"{tenant}{i}", count, weight if tenant == "a" else 1.0) for i, (tenant, count) in enumerate(asked)
        ]
        shares = fair.share(wants, budget)
        assert sum(shares.values()) == min(budget, sum(count for _, count in asked))
        assert all(0 < shares[w.seq_id] <= w.num_tokens for w in wants if w.seq_id in shares)
        assert shares.keys() <= {w.seq_id for w in wants}


def test_a_worker_says_what_of_each_class_is_still_to_be_computed() -> None:
    batcher = make_batcher()
    for klass, prompt in (("interactive", 3), ("analysis", 5), ("batch", 7)):
        batcher.reserve(make_spec(klass, prompt=prompt, klass=klass))
    gauges = batcher.gauges()
    assert gauges.class_tokens == (3, 5, 7)
    assert gauges.queue_tokens == 15
