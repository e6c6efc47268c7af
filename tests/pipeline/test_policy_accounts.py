"""Quota and ledger inside a real Redis: equal to the pure model, and atomic."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator

import pytest

from services.policy import ledger, quota
from services.policy.accounts import Accounts
from services.policy.quota import Asker, QuotaState
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Unavailable
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import Dispatch, Epoch, IngressId, RequestId, TenantId, WorkerId
from shared.contracts.parts import ComputeRow, Totals
from shared.store.redis_store import connect_redis
from tests.servers import RedisServer

DEMO = TenantId("demo")
SECOND = 1_000_000
TTL = 100 * SECOND


@pytest.fixture
async def accounts(redis_server: RedisServer) -> AsyncIterator[Accounts]:
    async with connect_redis(redis_server.url) as redis:
        yield Accounts(redis, f"test-{secrets.token_hex(4)}")


def settlement(name: str, epoch: int, tokens: int, *compute: ComputeRow) -> m.Settle:
    return m.Settle(
        attempt=Attempt(RequestId(name), Epoch(epoch)),
        grant=SignedGrant(b"", b""),
        prompt_tokens=tokens // 3,
        completion_tokens=tokens - tokens // 3,
        finish="stop",
        compute=compute,
    )


def compute_row(name: str, epoch: int, dispatch: int, worker: str, tokens: int) -> ComputeRow:
    totals = Totals(computed_tokens=tokens, wasted_tokens=1, prefill_s=0.5, decode_s=0.25)
    return ComputeRow(WorkerId(worker), Attempt(RequestId(name), Epoch(epoch), Dispatch(dispatch)), totals)


class Model:
    """The pure cores, put together as `settle.lua` puts them together."""

    def __init__(self) -> None:
        self.state = QuotaState()
        self.rows: dict[str, ledger.LedgerRow] = {}

    def settle(self, limits: Limits, name: str, settle: m.Settle, now_us: int) -> ledger.Booked:
        self.rows[name], booked = ledger.apply(self.rows.get(name), settle)
        self.state = quota.settle(self.state, limits, name, booked.token_change, now_us)
        return booked


@pytest.mark.parametrize("seed", range(4))
async def test_redis_agrees_with_the_pure_model(accounts: Accounts, seed: int) -> None:
    """Random requests, settlements, limits and times: every answer and every stored number is the same."""
    rng = random.Random(seed)
    model, now_us, reasons = Model(), 1_700_000_000 * SECOND, set[str]()
    limits = Limits(rng.choice([0, 7, 61]), rng.choice([1, 100, 997]), max_parallel=rng.choice([0, 3, 8]))
    for step in range(400):
        now_us += rng.choice([0, 1, rng.randrange(3 * SECOND), rng.randrange(200 * SECOND)])
        asked_us = now_us - rng.choice([0, 0, 0, 5 * SECOND])  # a clock that jumps back
        if rng.random() < 0.02:
            limits = Limits(rng.choice([0, 7, 61]), rng.choice([0, 100, 997]), max_parallel=rng.choice([0, 3, 8]))
        name = f"r{rng.randrange(step // 4 + 1)}"
        if rng.random() < 0.6:
            tokens, asker = rng.randrange(120), Asker(rng.choice(["k", "l"]), rng.choice([0, 1, 4]))
            ingress = IngressId(rng.choice(["", "gateway-a"]))
            model.state, expected = quota.reserve(model.state, limits, name, tokens, asked_us, TTL, asker)
            verdict, at_s, used = await accounts.reserve(DEMO, limits, name, tokens, TTL, asked_us, ingress, asker)
            reasons.add(verdict.reason)
            assert (step, verdict) == (step, expected)
            assert at_s == model.state.at_us / 1e6
            state, unit = model.state, quota.MINUTE_US
            levels = (state.request_level / unit, state.token_level / unit, state.held)
            assert (used.requests, used.tokens, used.held) == levels
            running = (len(state.holds), state.running(asker.key_id) if asker.max_parallel else 0)
            assert (used.running, used.key_running) == running
            assert (used.max_parallel, used.key_max_parallel) == (limits.max_parallel, asker.max_parallel)
            assert await accounts.used(DEMO, limits, asked_us, asker) == used
            counted = await accounts.running(DEMO, model.state.at_us)
            assert counted == {key: count for key in ("k", "l") if (count := state.running(key))}
        else:
            epoch = rng.randrange(1, 4)
            row = compute_row(name, epoch, rng.randrange(1, 3), rng.choice(["d1", "p1"]), rng.randrange(9))
            settle = settlement(name, epoch, rng.randrange(150), *([row] if rng.random() < 0.5 else []))
            expected_booked = model.settle(limits, name, settle, asked_us)
            assert await accounts.settle(DEMO, limits, name, settle, asked_us) == expected_booked
        state = model.state
        assert await accounts.quota(DEMO) == {
            "requests": str(state.request_level),
            "tokens": str(state.token_level),
            "at": str(state.at_us),
            "held": str(state.held),
        }
    assert reasons & {quota.PARALLEL, quota.KEY_PARALLEL}
    usage = await accounts.usage(DEMO)
    assert int(usage["requests"]) == len(model.rows)
    assert int(usage["prompt_tokens"]) == sum(row.prompt_tokens for row in model.rows.values())
    assert int(usage["completion_tokens"]) == sum(row.completion_tokens for row in model.rows.values())
    all_compute = list(itertools.chain.from_iterable(row.compute.values() for row in model.rows.values()))
    assert int(usage["computed_tokens"]) == sum(totals.computed_tokens for totals in all_compute)
    assert float(usage["compute_s"]) == 0.75 * len(all_compute)


async def test_a_hundred_at_once_never_pass_the_token_limit(accounts: Accounts) -> None:
    limits = Limits(tokens_per_minute=1000)
    asks = [accounts.reserve(DEMO, limits, f"r{i}", 84, TTL) for i in range(100)]
    verdicts = [verdict for verdict, _, _ in await asyncio.gather(*asks)]
    assert sum(verdict.reason == quota.OK for verdict in verdicts) == 1000 // 84
    assert int((await accounts.quota(DEMO))["held"]) == 1000 // 84 * 84


async def test_a_hundred_at_once_never_pass_the_request_limit(accounts: Accounts) -> None:
    limits = Limits(requests_per_minute=5)
    asks = [accounts.reserve(DEMO, limits, f"r{i}", 1, TTL) for i in range(100)]
    verdicts = [verdict for verdict, _, _ in await asyncio.gather(*asks)]
    # At 5 a minute one more fits every 12 s, longer than a hundred calls take.
    assert sum(verdict.reason == quota.OK for verdict in verdicts) == 5
    assert all(verdict.retry_us > 0 for verdict in verdicts if verdict.reason != quota.OK)


@pytest.mark.parametrize(
    ("limits", "asker", "reason"),
    [
        (Limits(max_parallel=4), quota.NO_KEY, quota.PARALLEL),
        (Limits(), Asker("k", 4), quota.KEY_PARALLEL),
        (Limits(max_parallel=4), Asker("k", 5), quota.PARALLEL),
        (Limits(max_parallel=9), Asker("k", 4), quota.KEY_PARALLEL),
    ],
)
async def test_never_more_at_once_than_the_limit_however_requests_end(
    accounts: Accounts, limits: Limits, asker: Asker, reason: str
) -> None:
    async def admitted(turn: int) -> list[str]:
        names = [f"{turn}-{number}" for number in range(60)]
        asks = [accounts.reserve(DEMO, limits, name, 1, TTL, asker=asker) for name in names]
        verdicts = [verdict for verdict, _, _ in await asyncio.gather(*asks)]
        assert {verdict.reason for verdict in verdicts} == {quota.OK, reason}
        return [name for name, verdict in zip(names, verdicts, strict=True) if verdict.reason == quota.OK]

    for turn in range(3):
        first, second, third, fourth = await admitted(turn)
        await accounts.release(DEMO, limits, first)
        await asyncio.gather(*(accounts.settle(DEMO, limits, second, settlement(second, 1, 9)) for _ in range(3)))
        await accounts.settle(DEMO, limits, third, settlement(third, 0, 0))  # of a lost ingress, then of itself
        await accounts.settle(DEMO, limits, third, settlement(third, 1, 9))
        later_us = int(await accounts.now_s() * SECOND) + turn
        await accounts.reserve(DEMO, limits, fourth, 1, TTL, later_us, asker=asker)  # again: one place still
        await accounts.settle(DEMO, limits, fourth, settlement(fourth, 1, 9))
        assert await accounts.running(DEMO) == {}


async def test_a_place_of_a_request_that_nobody_settles_is_free_when_its_time_is_over(accounts: Accounts) -> None:
    limits, asker = Limits(max_parallel=1), Asker("k", 1)
    await accounts.reserve(DEMO, limits, "a", 1, TTL, SECOND, asker=asker)
    verdict, _, used = await accounts.reserve(DEMO, limits, "b", 1, TTL, TTL, asker=asker)
    assert (verdict.reason, used.running, used.key_running) == (quota.PARALLEL, 1, 1)
    verdict, _, used = await accounts.reserve(DEMO, limits, "b", 1, TTL, TTL + SECOND, asker=asker)
    assert (verdict.reason, used.running, used.key_running) == (quota.OK, 1, 1)


async def test_tenants_do_not_share_a_quota(accounts: Accounts) -> None:
    limits = Limits(requests_per_minute=1)
    for tenant in ("a", "b"):
        verdict, _, _ = await accounts.reserve(TenantId(tenant), limits, "same-id", 1, TTL)
        assert verdict.reason == quota.OK


async def test_concurrent_redeliveries_book_once(accounts: Accounts) -> None:
    limits = Limits(tokens_per_minute=10_000)
    await accounts.reserve(DEMO, limits, "r", 500, TTL)
    settle = settlement("r", 1, 90, compute_row("r", 1, 1, "d1", 7))
    booked = await asyncio.gather(*(accounts.settle(DEMO, limits, "r", settle) for _ in range(20)))
    assert sum(b.replaced for b in booked) == 1
    assert sum(b.compute_rows for b in booked) == 1
    row = await accounts.row(DEMO, RequestId("r"))
    assert (row["epoch"], row["prompt_tokens"], row["completion_tokens"], row["finish"]) == ("1", "30", "60", "stop")
    assert {"requests": "1", "computed_tokens": "7"}.items() <= (await accounts.usage(DEMO)).items()
    assert (await accounts.quota(DEMO))["held"] == "0"


async def test_a_released_hold_frees_its_tokens_and_keeps_the_request_counted(accounts: Accounts) -> None:
    limits = Limits(requests_per_minute=2, tokens_per_minute=10)
    await accounts.reserve(DEMO, limits, "a", 10, TTL, SECOND)
    await accounts.release(DEMO, limits, "a", SECOND)
    verdict, _, _ = await accounts.reserve(DEMO, limits, "b", 10, TTL, SECOND)
    assert verdict.reason == quota.OK
    verdict, _, _ = await accounts.reserve(DEMO, limits, "c", 0, TTL, SECOND)
    assert verdict.reason == quota.REQUESTS


async def test_without_redis_every_question_is_unavailable(own_redis_server: RedisServer) -> None:
    async with connect_redis(own_redis_server.url) as redis:
        accounts = Accounts(redis)
        await accounts.reserve(DEMO, Limits(), "a", 1, TTL)
        own_redis_server.kill()
        with pytest.raises(Unavailable) as caught:
            await accounts.reserve(DEMO, Limits(), "b", 1, TTL)
        assert caught.value.retry_after_s > 0
