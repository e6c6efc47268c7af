"""Quota and ledger as pure functions."""

from __future__ import annotations

import msgspec
import pytest

from services.policy import quota
from services.policy.ledger import LedgerRow, apply
from services.policy.quota import Asker, QuotaState, Verdict, reserve, settle
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import Dispatch, Epoch, RequestId, WorkerId
from shared.contracts.parts import ComputeRow, Totals

SECOND = 1_000_000
TTL = 600 * SECOND


def admitted(state: QuotaState, limits: Limits, name: str, tokens: int, now_us: int) -> tuple[QuotaState, bool]:
    state, verdict = reserve(state, limits, name, tokens, now_us, TTL)
    return state, verdict.reason == quota.OK


def test_no_limit_admits_everything_and_keeps_no_level() -> None:
    state = QuotaState()
    for i in range(100):
        state, yes = admitted(state, Limits(), str(i), 10**6, 0)
        assert yes
    assert (state.request_level, state.token_level) == (0, 0)


def test_requests_per_minute_refuses_and_says_when() -> None:
    limits, state = Limits(requests_per_minute=6), QuotaState()
    for i in range(6):
        state, yes = admitted(state, limits, str(i), 1, 0)
        assert yes
    state, verdict = reserve(state, limits, "7", 1, 0, TTL)
    assert verdict == Verdict(quota.REQUESTS, 10 * SECOND)
    assert not admitted(state, limits, "7", 1, verdict.retry_us - 1)[1]
    assert admitted(state, limits, "7", 1, verdict.retry_us)[1]


def test_the_worst_case_of_everything_admitted_stays_within_the_limit() -> None:
    limits, state = Limits(tokens_per_minute=100), QuotaState()
    answers = []
    for i in range(10):
        state, yes = admitted(state, limits, str(i), 84, 0)
        answers.append(yes)
    assert answers == [True] + [False] * 9
    assert state.held == 84


def test_settling_gives_back_what_was_not_used() -> None:
    limits = Limits(tokens_per_minute=100)
    state, _ = admitted(QuotaState(), limits, "a", 90, 0)
    assert not admitted(state, limits, "b", 50, 0)[1]
    state = settle(state, limits, "a", 20, 0)
    assert admitted(state, limits, "b", 80, 0)[1]
    assert not admitted(state, limits, "b", 81, 0)[1]


def test_retry_after_is_exact_when_nothing_is_held() -> None:
    limits = Limits(tokens_per_minute=60)
    state, _ = admitted(QuotaState(), limits, "a", 60, 0)
    state = settle(state, limits, "a", 60, 0)
    state, verdict = reserve(state, limits, "b", 7, 0, TTL)
    assert verdict == Verdict(quota.TOKENS, 7 * SECOND)
    assert admitted(state, limits, "b", 7, 7 * SECOND)[1]


def test_what_never_fits_is_told_apart() -> None:
    _, verdict = reserve(QuotaState(), Limits(tokens_per_minute=10), "a", 11, 0, TTL)
    assert verdict == Verdict(quota.TOO_LARGE)


def test_when_only_running_requests_are_in_the_way_the_advice_is_short() -> None:
    limits = Limits(tokens_per_minute=10)
    state, _ = admitted(QuotaState(), limits, "a", 10, 0)
    _, verdict = reserve(state, limits, "b", 1, 0, TTL)
    assert verdict == Verdict(quota.TOKENS, quota.HELD_RETRY_US)


def test_a_repeated_reservation_counts_once() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=10)
    state, _ = admitted(QuotaState(), limits, "a", 10, 0)
    again, yes = admitted(state, limits, "a", 10, 0)
    assert yes
    assert again == state


def test_an_expired_hold_is_let_go_and_its_settlement_becomes_debt() -> None:
    limits = Limits(tokens_per_minute=60)
    state, _ = admitted(QuotaState(), limits, "a", 60, 0)
    state, yes = admitted(state, limits, "b", 60, TTL)
    assert yes
    state = settle(state, limits, "b", 60, TTL)
    state = settle(state, limits, "a", 60, TTL)
    state, verdict = reserve(state, limits, "c", 1, TTL, TTL)
    assert verdict == Verdict(quota.TOKENS, 61 * SECOND)


def test_as_many_at_once_as_the_limit_says_and_a_place_is_free_when_one_settles() -> None:
    limits, state = Limits(max_parallel=2), QuotaState()
    for name in "ab":
        state, yes = admitted(state, limits, name, 1, 0)
        assert yes
    state, verdict = reserve(state, limits, "c", 1, 0, TTL)
    assert verdict == Verdict(quota.PARALLEL, SECOND)
    state = settle(state, limits, "a", 1, 0)
    state = settle(state, limits, "a", 0, 0)  # again: no second place
    state, yes = admitted(state, limits, "c", 1, 0)
    assert yes
    assert not admitted(state, limits, "d", 1, 0)[1]


def test_a_key_has_a_limit_of_its_own_which_other_keys_do_not_use_up() -> None:
    one, other = Asker("one", 1), Asker("other", 1)
    state, verdict = reserve(QuotaState(), Limits(), "a", 1, 0, TTL, one)
    state, verdict = reserve(state, Limits(), "b", 1, 0, TTL, one)
    assert verdict == Verdict(quota.KEY_PARALLEL, SECOND)
    state, verdict = reserve(state, Limits(), "c", 1, 0, TTL, other)
    assert verdict == Verdict(quota.OK)
    # a request that another key takes over stays the first one's
    state, verdict = reserve(state, Limits(), "a", 1, 0, TTL, other)
    assert verdict == Verdict(quota.OK)
    assert (state.running("one"), state.running("other")) == (1, 1)


def test_of_several_limits_the_one_that_takes_longest_is_told() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=10, max_parallel=1)
    state, _ = admitted(QuotaState(), limits, "a", 10, 0)
    assert reserve(state, limits, "b", 1, 0, TTL)[1] == Verdict(quota.REQUESTS, 60 * SECOND)
    assert reserve(state, limits, "b", 1, 59 * SECOND + 1, TTL)[1] == Verdict(quota.TOKENS, quota.HELD_RETRY_US)
    wide = Limits(requests_per_minute=1, max_parallel=1)
    assert reserve(state, wide, "b", 1, 59 * SECOND + 1, TTL)[1] == Verdict(quota.PARALLEL, SECOND)


def test_what_takes_no_tokens_waits_for_none() -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=100)
    indebted = QuotaState(token_level=500 * quota.MINUTE_US)
    assert reserve(indebted, limits, "counted", 0, 0, TTL)[1] == Verdict(quota.OK)
    assert reserve(indebted, limits, "run", 1, 0, TTL)[1].reason == quota.TOKENS
    used_up = QuotaState(request_level=60 * quota.MINUTE_US, token_level=500 * quota.MINUTE_US)
    assert reserve(used_up, limits, "counted", 0, 0, TTL)[1].reason == quota.REQUESTS


def test_time_never_runs_backwards() -> None:
    limits = Limits(tokens_per_minute=60)
    state = settle(QuotaState(), limits, "a", 60, 100 * SECOND)
    state = quota.advance(state, limits, 50 * SECOND)
    assert state.at_us == 100 * SECOND
    assert state.token_level == 60 * quota.MINUTE_US


# ---------------------------------------------------------------------------------------------- ledger


def account(epoch: int, prompt: int, completion: int, *compute: ComputeRow) -> m.Settle:
    return m.Settle(
        attempt=Attempt(RequestId("req-1"), Epoch(epoch)),
        grant=SignedGrant(b"", b""),
        prompt_tokens=prompt,
        completion_tokens=completion,
        compute=compute,
        finish="stop",
    )


def compute(epoch: int, dispatch: int, worker: str, tokens: int) -> ComputeRow:
    attempt = Attempt(RequestId("req-1"), Epoch(epoch), Dispatch(dispatch))
    return ComputeRow(WorkerId(worker), attempt, Totals(computed_tokens=tokens))


def test_a_higher_epoch_replaces_an_equal_or_lower_one_does_not() -> None:
    row, booked = apply(None, account(1, 10, 5))
    assert (booked.replaced, booked.token_change) == (True, 15)
    row, booked = apply(row, account(1, 10, 99))
    assert (booked.replaced, booked.token_change, row.tokens) == (False, 0, 15)
    row, booked = apply(row, account(3, 10, 8))
    assert (booked.replaced, booked.token_change, row.tokens) == (True, 3, 18)
    row, booked = apply(row, account(2, 10, 7))
    assert (booked.replaced, row.tokens, row.epoch) == (False, 18, 3)


def test_compute_adds_once_per_attempt_and_worker() -> None:
    first, other = compute(1, 1, "d1", 7), compute(1, 2, "d1", 8)
    row, booked = apply(None, account(1, 1, 1, first))
    assert booked.compute_rows == 1
    row, booked = apply(row, account(1, 1, 1, first, other, compute(1, 1, "p1", 9)))
    assert booked.compute_rows == 2
    row, booked = apply(row, account(1, 1, 1, first, other))
    assert booked.compute_rows == 0
    assert sorted(t.computed_tokens for t in row.compute.values()) == [7, 8, 9]


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_repeated_settlement_changes_nothing(epoch: int) -> None:
    settlement = account(epoch, 3, 4, compute(1, 1, "d1", 1))
    row, _ = apply(LedgerRow(1, 1, 1, 0, "stop"), settlement)
    again, booked = apply(row, settlement)
    assert again == row
    assert (booked.token_change, booked.compute_rows) == (0, 0)
    assert msgspec.structs.asdict(settlement)["finish"] == "stop"
