"""Records of stored responses in a real Redis: kept sealed, bounded, for a time, and gone when they are deleted."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from functools import partial

import pytest

from services.gateway import keyed_run
from services.gateway.keyed_run import Begun, KeyedRun
from services.gateway.once import Key, Once
from services.gateway.stored_run import StoredRun
from services.policy.idempotency import MAX_PART_BYTES
from services.policy.responses import RUNNING_S, ResponseRecords
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts.errors import Conflict, Forbidden, NotFound, ProtocolError, Unavailable
from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.store.redis_store import RedisStore, connect_redis
from shared.store.sealed import Sealer
from tests.servers import RedisServer

T, OTHER = TenantId("acme"), TenantId("other")
A, B = IngressId("gateway-a"), IngressId("gateway-b")
TTL_S = 7 * RUNNING_S


class Store:
    def __init__(self, redis: RedisStore) -> None:
        self.redis = redis
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.kept = ResponseRecords(redis, Sealer(bytes(32)), TTL_S, self.prefix)

    async def claim(
        self, who: IngressId = A, tenant: TenantId = T, name: bytes = b"n", *, lost: IngressId | None = None
    ) -> i.IdempotencyState:
        ask = i.IdempotencyClaim(
            key_hash=bytes(32), name=name, body=b"", ingress_id=who, seed=secrets.randbits(64), resume=lost is not None
        )
        return (await self.kept.claim(tenant, ask, lost)).state

    async def put(self, state: i.IdempotencyState, *parts: bytes, first: int = 0, who: IngressId = A) -> bool:
        news = r.ResponseInput(
            tenant=T, request_id=state.request_id, ingress_id=who, run=state.run, first_part=first, parts=parts
        )
        return (await self.kept.keep_input(news)).held

    async def write(
        self, mine: i.IdempotencyState, *parts: bytes, state: str = i.RUNNING, who: IngressId = A
    ) -> i.IdempotencyWritten:
        write = i.IdempotencyWrite(
            tenant=T, request_id=mine.request_id, ingress_id=who, run=mine.run, state=state, parts=parts
        )
        return await self.kept.write(write)

    async def find(self, request_id: RequestId, tenant: TenantId = T, known_input: int = 0) -> r.ResponseFound:
        ask = r.ResponseFind(key_hash=bytes(32), request_id=request_id, known_input=known_input)
        return (await self.kept.find(tenant, ask))[0]

    async def keys(self) -> list[bytes]:
        return [key async for key in self.redis._client.scan_iter(f"{self.prefix}:*")]

    async def total(self) -> int:
        return int(await self.redis.execute("HGET", f"{self.prefix}:{{{T}}}:response-bytes", "total") or 0)


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Store]:
    async with connect_redis(redis_server.url) as redis:
        yield Store(redis)


async def test_it_is_kept_sealed_with_its_input_and_gone_when_deleted(store: Store) -> None:
    mine = await store.claim()
    assert await store.put(mine, b"what was asked", b"and more")
    assert await store.put(mine, b"and more", b"the last", first=1)  # repeated, with news
    assert (await store.write(mine, b"what was said", state=i.DONE)).held
    found = await store.find(mine.request_id)
    assert (found.outcome, found.num_input, found.num_parts) == (i.DONE, 3, 1)
    assert found.input == (b"what was asked", b"and more", b"the last")
    assert found.parts == (b"what was said",)
    assert (await store.find(mine.request_id, known_input=2)).input == (b"the last",)
    for key in await store.keys():
        dumped = await store.redis.execute("DUMP", key)
        assert b"what was" not in dumped
    await store.kept.delete(T, mine.request_id)
    assert await store.total() == 0
    assert [key.rpartition(b":")[2] for key in await store.keys()] == [b"response-bytes"]
    for again in (store.kept.delete(T, mine.request_id), store.kept.cancel(T, mine.request_id)):
        with pytest.raises(NotFound):
            await again
    with pytest.raises(NotFound):
        await store.find(mine.request_id)


async def test_another_tenants_is_not_there(store: Store) -> None:
    mine = await store.claim()
    await store.write(mine, b"x", state=i.DONE)
    other = await store.claim(tenant=OTHER)
    assert other.request_id != mine.request_id
    for request_id in (mine.request_id, RequestId(mine.request_id[:24] + "0" * 12)):
        with pytest.raises(NotFound):
            await store.find(request_id, OTHER)
        with pytest.raises(NotFound):
            await store.kept.delete(OTHER, request_id)
    with pytest.raises(NotFound):  # the same record by an id that is not quite its own
        await store.find(RequestId(mine.request_id[:-1] + ("0" if mine.request_id[-1] != "0" else "1")))
    assert (await store.find(mine.request_id)).outcome == i.DONE


async def test_it_lives_a_day_while_it_runs_and_its_time_once_it_has_ended(store: Store) -> None:
    async def lives() -> set[int]:
        found = [int(await store.redis.execute("TTL", key)) for key in await store.keys() if b":response" in key]
        return {round(life / RUNNING_S) for life in found if life > 0}

    mine = await store.claim()
    await store.put(mine, b"x")
    await store.write(mine, b"y")
    assert await lives() == {1}
    await store.write(mine, state=i.DONE)
    assert await lives() == {7}
    assert await store.put(mine, b"x")  # repeated, as the answer to the last word was lost
    assert await lives() == {7}
    other = await store.claim(name=b"m")
    await store.put(other, b"x")
    await store.write(other, b"y")
    assert await lives() == {1, 7}
    bytes_key = f"{store.prefix}:{{{T}}}:response-bytes"
    assert round(int(await store.redis.execute("TTL", bytes_key)) / RUNNING_S) == 7


async def test_who_runs_it_hears_that_it_shall_end(store: Store) -> None:
    mine = await store.claim()
    assert not (await store.write(mine)).cancel
    await store.kept.cancel(T, mine.request_id)
    written = await store.write(mine)
    assert (written.held, written.cancel) == (True, True)
    assert (await store.find(mine.request_id)).cancelled
    last = await store.write(mine, b"x", state=i.DONE)
    assert (last.held, last.cancel) == (True, False)
    await store.kept.cancel(T, mine.request_id)
    assert (await store.find(mine.request_id)).outcome == i.DONE


async def test_who_runs_it_hears_that_it_was_deleted_or_taken_over(store: Store) -> None:
    mine = await store.claim()
    await store.put(mine, b"x")
    theirs = await store.claim(B, lost=A)
    assert (theirs.outcome, theirs.run, theirs.request_id) == (i.YOURS, 2, mine.request_id)
    late = await store.write(mine)
    assert (late.held, late.gone) == (False, False)
    assert not await store.put(mine, b"y", first=1)
    assert (await store.find(mine.request_id)).input == (b"x",)
    await store.kept.delete(T, mine.request_id)
    gone = await store.write(theirs, who=B)
    assert (gone.held, gone.gone) == (False, True)
    with pytest.raises(NotFound):
        await store.claim(B, lost=A)


async def test_one_that_was_refused_leaves_nothing(store: Store) -> None:
    mine = await store.claim()
    await store.put(mine, b"x")
    await store.write(mine, state=i.REFUSED)
    assert await store.total() == 0
    assert len(await store.keys()) == 1


async def test_one_whose_claims_were_not_answered_leaves_nothing(store: Store) -> None:
    for tries in (2, 5):
        for _ in range(tries):
            mine = await store.claim()
        assert mine.run == tries
        for _ in range(2):  # the answer to the first may be lost
            assert (await store.write(mine, state=i.REFUSED)).held
        assert await store.keys() == []


async def test_one_that_may_have_begun_stays_when_its_next_run_is_refused(store: Store) -> None:
    asked, began, moved = [await store.claim(name=name) for name in (b"asked", b"began", b"moved")]
    await store.put(asked, b"x")
    await store.write(began)
    for name in (b"asked", b"began"):
        await store.write(await store.claim(name=name), state=i.REFUSED)
    await store.write(await store.claim(B, name=b"moved", lost=A), state=i.REFUSED, who=B)
    for mine in (asked, began, moved):
        assert (await store.find(mine.request_id)).outcome == i.OPEN


async def test_a_stored_response_whose_claim_was_not_answered_leaves_no_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_run, "LATE_PAUSE_S", 0.02)
    lost = [Unavailable("no answer in time")] * 3

    async def ask(claim: i.IdempotencyClaim) -> i.IdempotencyState:
        found = await store.kept.claim(T, claim)
        if lost:
            raise lost.pop()
        return found.state

    async def begin(run: KeyedRun) -> Begun:
        raise AssertionError("its client is gone")

    make_run = partial(StoredRun, store.kept.write, store.kept.keep_input)
    once = Once(ask, store.kept.write, A, 0.0, lambda _, *of: make_run(*of))
    with pytest.raises(Unavailable):
        await once.enter(Key(T, bytes(32), b"n", b""), begin)
    async with asyncio.timeout(30):
        while once.entries:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert not lost
    assert await store.keys() == []


async def test_a_tenant_has_so_much(store: Store) -> None:
    first = await store.claim()
    await store.put(first, b"x" * 1000)
    await store.write(first, b"y" * 1000, state=i.DONE)
    held = await store.total()
    assert 2000 < held < 2200
    store.kept.full_bytes = held
    with pytest.raises(Forbidden) as full:
        await store.claim(name=b"m")
    assert (full.value.code, full.value.param) == ("storage_limit_exceeded", "store")
    assert (await store.claim(tenant=OTHER)).outcome == i.YOURS
    await store.kept.delete(T, first.request_id)
    assert (await store.claim(name=b"m")).outcome == i.YOURS


async def test_parts_are_bounded_and_in_order(store: Store) -> None:
    mine = await store.claim()
    with pytest.raises(ProtocolError):
        await store.put(mine, b"x" * (MAX_PART_BYTES + 1))
    with pytest.raises(Conflict):
        await store.put(mine, b"x", first=1)


async def test_a_tenants_purge_takes_them_all(store: Store) -> None:
    for name in (b"a", b"b"):
        mine = await store.claim(name=name)
        await store.put(mine, b"x")
        await store.write(mine, b"y", state=i.DONE)
    assert await store.kept.purge(T) == 2
    assert await store.keys() == []
