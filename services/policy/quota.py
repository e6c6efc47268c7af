"""What a tenant has of its limits: requests per minute, tokens per minute, requests at once. Pure; `lua/` says the same
inside Redis.

Each limit a minute is a bucket that drains at its limit per minute and overflows at its limit. A request fills the
request bucket by one. Its tokens (prompt + max_tokens) are *held* until it settles, when the true count goes into the
token bucket instead; so at any moment

    level + held <= tokens_per_minute          (checked at reserve)

holds for everything admitted. A hold that expires is let go; a settlement that comes later still fills the bucket,
past its brim if need be: that is debt, and the tenant waits until it has drained.

Requests at once are the holds themselves, of the tenant and of the key that asks. There is no count beside them that
could drift from them.

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
PARALLEL = "max_parallel"
KEY_PARALLEL = "key_max_parallel"
"""The limit of the key that asks; the one before is its tenant's."""
PARALLEL_RETRY_US = 1_000_000
"""Advice when all that may run at once do: nobody knows when one of them ends."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The key that asks, and how many requests of it may run at once; 0 = no limit of its own."""

    key_id: str = ""
    max_parallel: int = 0


NO_KEY = Asker()


@dataclass(frozen=True, slots=True)
class Hold:
    """Tokens kept for a request that has not settled, until `expires_us`; `key_id` asked for it."""

    tokens: int
    expires_us: int
    key_id: str = ""


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

    def running(self, key_id: str) -> int:
        """Requests of one key that have not settled."""
        return sum(hold.key_id == key_id for hold in self.holds.values())


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
    state: QuotaState,
    limits: Limits,
    reservation_id: str,
    tokens: int,
    now_us: int,
    ttl_us: int,
    asker: Asker = NO_KEY,
) -> tuple[QuotaState, Verdict]:
    """Count one request and hold its tokens, or say which limit is in the way and for how long.

    A reservation that is held already is granted again, from now on, without being counted twice. Where several limits
    are in the way, the one that takes longest is told. One of no tokens is none of the tokens' limit, in any debt.
    """
    state = advance(state, limits, now_us)
    if (held := state.holds.get(reservation_id)) is not None:
        again = replace(held, expires_us=state.at_us + ttl_us)
        return replace(state, holds={**state.holds, reservation_id: again}), Verdict(OK)
    if limits.tokens_per_minute and tokens > limits.tokens_per_minute:
        return state, Verdict(TOO_LARGE)
    request_wait = _wait(state.request_level, 1, limits.requests_per_minute)
    token_wait = _wait(state.token_level, state.held + tokens, limits.tokens_per_minute) if tokens else 0
    waits = {
        REQUESTS: request_wait,
        TOKENS: token_wait,
        PARALLEL: _slot_wait(len(state.holds), limits.max_parallel),
        KEY_PARALLEL: _slot_wait(state.running(asker.key_id), asker.max_parallel),
    }
    longest = max(waits, key=waits.__getitem__)  # of equal ones the first
    if waits[longest]:
        return state, Verdict(longest, waits[longest])
    request_level = state.request_level + MINUTE_US if limits.requests_per_minute else 0
    hold = Hold(tokens, state.at_us + ttl_us, asker.key_id)
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


def _slot_wait(running: int, limit: int) -> int:
    return PARALLEL_RETRY_US if limit and running >= limit else 0


def _wait(level: int, need: int, limit: int) -> int:
    """Microseconds until `need` fits; 0 when it fits now."""
    over = level + need * MINUTE_US - limit * MINUTE_US
    if not limit or over <= 0:
        return 0
    return -(-over // limit) if need <= limit else HELD_RETRY_US
