"""A tenant's two limits: requests per minute and tokens per minute. Pure; `lua/` says the same inside Redis.

Each limit is a bucket that drains at its limit per minute and overflows at its limit. A request fills the request
bucket by one. Its tokens (prompt + max_tokens) are *held* until it settles, when the true count goes into the token
bucket instead; so at any moment

    level + held <= tokens_per_minute          (checked at reserve)

holds for everything admitted. A hold that expires is let go; a settlement that comes later still fills the bucket,
past its brim if need be: that is debt, and the tenant waits until it has drained.

Levels are integers in units of 1/60,000,000 request or token, the time is in whole microseconds: so Python and Lua
(double precision, exact below 2**53) agree to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shared.contracts.grants import Limits

MINUTE_US = 60_000_000
"""Microseconds in a minute, and units of level in one request or token."""
MAX_LEVEL = 9_000_000_000_000_000
"""Levels stop here, below 2**53: 150 million tokens of debt."""
HELD_RETRY_US = 5_000_000
"""Advice when only the tenant's own running requests are in the way: nobody knows when they end."""

OK = "ok"
REQUESTS = "requests_per_minute"
TOKENS = "tokens_per_minute"
TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Hold:
    """Tokens kept for a request that has not settled, until `expires_us`."""

    tokens: int
    expires_us: int


@dataclass(frozen=True, slots=True)
class QuotaState:
    """What is known of one tenant. `at_us` is when the levels were last drained."""

    request_level: int = 0
    token_level: int = 0
    at_us: int = 0
    holds: dict[str, Hold] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(hold.tokens for hold in self.holds.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is OK, or which limit refused; `retry_us` is when to come back, 0 if never or at once."""

    reason: str
    retry_us: int = 0


def advance(state: QuotaState, limits: Limits, now_us: int) -> QuotaState:
    """Drain both buckets up to `now_us` and let go of expired holds. Time never runs backwards here."""
    now_us = max(now_us, state.at_us)
    elapsed = now_us - state.at_us
    return QuotaState(
        request_level=_drained(state.request_level, limits.requests_per_minute, elapsed),
        token_level=_drained(state.token_level, limits.tokens_per_minute, elapsed),
        at_us=now_us,
        holds={name: hold for name, hold in state.holds.items() if hold.expires_us > now_us},
    )


def reserve(
    state: QuotaState, limits: Limits, reservation_id: str, tokens: int, now_us: int, ttl_us: int
) -> tuple[QuotaState, Verdict]:
    """Count one request and hold its tokens, or say which limit is in the way and for how long.

    A reservation that is held already is granted again, from now on, without being counted twice.
    """
    state = advance(state, limits, now_us)
    if (held := state.holds.get(reservation_id)) is not None:
        again = Hold(held.tokens, state.at_us + ttl_us)
        return replace(state, holds={**state.holds, reservation_id: again}), Verdict(OK)
    if limits.tokens_per_minute and tokens > limits.tokens_per_minute:
        return state, Verdict(TOO_LARGE)
    request_wait = _wait(state.request_level, 1, limits.requests_per_minute)
    token_wait = _wait(state.token_level, state.held + tokens, limits.tokens_per_minute)
    if request_wait or token_wait:
        reason = REQUESTS if request_wait >= token_wait else TOKENS
        return state, Verdict(reason, max(request_wait, token_wait))
    request_level = state.request_level + MINUTE_US if limits.requests_per_minute else 0
    hold = Hold(tokens, state.at_us + ttl_us)
    return replace(state, request_level=request_level, holds={**state.holds, reservation_id: hold}), Verdict(OK)


def settle(state: QuotaState, limits: Limits, reservation_id: str, tokens: int, now_us: int) -> QuotaState:
    """Let go of the hold, if it is still there, and fill the token bucket by `tokens`.

    `tokens` may be negative, when a later account of the same request is smaller; a level never falls below zero.
    """
    state = advance(state, limits, now_us)
    holds = {name: hold for name, hold in state.holds.items() if name != reservation_id}
    level = min(MAX_LEVEL, max(0, state.token_level + tokens * MINUTE_US)) if limits.tokens_per_minute else 0
    return replace(state, token_level=level, holds=holds)


def _drained(level: int, limit: int, elapsed_us: int) -> int:
    return max(0, level - limit * elapsed_us) if limit else 0


def _wait(level: int, need: int, limit: int) -> int:
    """Microseconds until `need` fits; 0 when it fits now."""
    over = level + need * MINUTE_US - limit * MINUTE_US
    if not limit or over <= 0:
        return 0
    return -(-over // limit) if need <= limit else HELD_RETRY_US
