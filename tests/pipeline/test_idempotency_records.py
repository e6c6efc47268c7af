"""Idempotency records in a real Redis, and what becomes of reservations whose ingress died."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator

import pytest

from services.policy import idempotency
from services.policy.accounts import Accounts
from services.policy.idempotency import MAX_PART_BYTES, IdempotencyRecords
from services.policy.ingress_watch import LEASE_S, IngressWatch
from services.policy.lost_ingresses import FINISH, LostIngresses
from services.policy.records import Records
from services.policy.unclaimed_holds import EVERY_S, UNCLAIMED_S, UnclaimedHolds
from shared.contracts import idempotency_messages as i
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Conflict, Internal, NotFound, OtherBody, ProtocolError, QuotaExceeded
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import Epoch, IngressId, RequestId, TenantId
from shared.contracts.messages import Settle
from shared.contracts.tokens import pack_tokens
from shared.store.redis_store import RedisStore, connect_redis
from shared.store.sealed import Sealer
from tests.servers import RedisServer

T, OTHER = TenantId("acme"), TenantId("other")
A, B = IngressId("gateway-a"), IngressId("gateway-b")
LIMITS = Limits(requests_per_minute=100, tokens_per_minute=10_000)


class Store:
    def __init__(self, redis: RedisStore) -> None:
        self.redis = redis
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.kept = IdempotencyRecords(redis, Sealer(bytes(32)), 600, self.prefix)
        self.accounts, self.records = Accounts(redis, self.prefix), Records(redis, self.prefix)
        self.now = 100.0
        self.watch = IngressWatch()
        self.lost = LostIngresses(self.records, self.accounts, (self.kept,), self.watch, LIMITS, lambda: self.now)

    async def claim(
        self,
        who: IngressId = A,
        name: str = "k",
        body: str = "b",
        tenant: TenantId = T,
        lost: IngressId | None = None,
        **more: object,
    ) -> i.IdempotencyState:
        return (await self.kept.claim(tenant, ask_of(who, name, body, **more), lost)).state

    async def write(self, mine: i.IdempotencyState, who: IngressId = A, **more: object) -> bool:
        write = i.IdempotencyWrite(
            tenant=T,
            request_id=mine.request_id,
            ingress_id=who,
            run=mine.run,
            **more,  # type: ignore[arg-type]
        )
        return (await self.kept.write(write)).held


def ask_of(who: IngressId, name: str, body: str, **more: object) -> i.IdempotencyClaim:
    digest = hashlib.sha256
    return i.IdempotencyClaim(
        key_hash=bytes(32),
        name=digest(name.encode()).digest(),
        body=digest(body.encode()).digest(),
        ingress_id=who,
        seed=secrets.randbits(64),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Store]:
    async with connect_redis(redis_server.url) as redis:
        yield Store(redis)


async def test_the_first_has_it_and_others_see_it_run(store: Store) -> None:
    mine = await store.claim(A)
    assert (mine.outcome, mine.run) == (i.YOURS, 1)
    theirs = await store.claim(B)
    assert (theirs.outcome, theirs.run, theirs.request_id, theirs.seed) == (i.RUNNING, 1, mine.request_id, mine.seed)
    assert await store.write(mine, parts=(b"one", b"two"))
    seen = await store.claim(B)
    assert seen.parts == (b"one", b"two")
    assert await store.write(mine, parts=(b"three",), first_part=2, state=i.DONE)
    rest = await store.claim(B, known_run=1, known_parts=2)
    assert (rest.outcome, rest.parts) == (i.DONE, (b"three",))
    assert (await store.claim(A)).parts == (b"one", b"two", b"three")


async def test_tenants_keys_and_bodies_are_told_apart(store: Store) -> None:
    mine = await store.claim(A)
    other = await store.claim(A, tenant=OTHER)
    another = await store.claim(A, name="l")
    assert len({mine.request_id, other.request_id, another.request_id}) == 3
    with pytest.raises(OtherBody):
        await store.claim(B, body="c")


async def test_a_claim_fences_the_run_before_it(store: Store) -> None:
    first = await store.claim(A)
    assert await store.write(first, committed=pack_tokens([1, 2, 3]), parts=(b"old",))
    second = await store.claim(B, lost=A)
    assert (second.outcome, second.run, second.parts) == (i.YOURS, 2, ())
    assert second.committed == pack_tokens([1, 2, 3])
    assert second.seed == first.seed
    assert not await store.write(first, state=i.DONE)
    assert not await store.write(first)
    assert await store.write(second, who=B, state=i.DONE, parts=(b"new",))
    assert (await store.claim(A)).parts == (b"new",)


async def test_one_that_asks_for_what_it_owns_has_lost_it_and_gets_it_anew(store: Store) -> None:
    await store.claim(A)
    assert (await store.claim(A)).run == 2


async def test_an_open_record_is_the_next_ones(store: Store) -> None:
    first = await store.claim(A)
    assert await store.write(first, state=i.OPEN)
    assert await store.write(first, state=i.OPEN)  # again
    assert not await store.write(first)
    assert (await store.claim(B)).outcome == i.YOURS


async def test_a_first_run_refused_before_it_began_leaves_nothing(store: Store) -> None:
    first = await store.claim(A)
    assert await store.write(first, state=i.REFUSED)
    assert await store.write(first, state=i.REFUSED)  # again
    assert await store.redis.execute("KEYS", f"{store.prefix}:*") == []
    second = await store.claim(B, body="other")
    assert (second.outcome, second.run) == (i.YOURS, 1)
    assert await store.write(first, state=i.REFUSED)  # too late: it is not the record of this run
    assert await store.write(second, who=B)


async def test_a_later_run_that_was_refused_leaves_the_record_open(store: Store) -> None:
    await store.claim(A)
    fenced = await store.claim(A)
    later = await store.claim(B, lost=A)
    assert not await store.write(fenced, state=i.REFUSED)
    assert await store.write(later, who=B, state=i.REFUSED)
    assert await store.write(later, who=B, state=i.REFUSED)  # again
    found = await store.claim(A)
    assert (found.request_id, found.run) == (later.request_id, 4)


async def test_repeated_writes_change_nothing_and_gaps_are_refused(store: Store) -> None:
    mine = await store.claim(A)
    for _ in range(2):
        assert await store.write(mine, parts=(b"0", b"1"))
    assert await store.write(mine, parts=(b"1", b"2"), first_part=1)
    with pytest.raises(Conflict):
        await store.write(mine, parts=(b"9",), first_part=9)
    assert (await store.claim(B)).parts == (b"0", b"1", b"2")
    assert await store.write(mine, state=i.DONE)
    assert await store.write(mine, state=i.DONE)


async def test_long_answers_come_in_several_looks_and_parts_are_bounded(store: Store) -> None:
    mine = await store.claim(A)
    parts = tuple(b"%d" % number for number in range(20))
    await store.write(mine, parts=parts, state=i.DONE)
    got: tuple[bytes, ...] = ()
    more = True
    while more:
        state = await store.claim(B, known_run=1, known_parts=len(got))
        got, more = got + state.parts, state.more
    assert got == parts
    with pytest.raises(ProtocolError):
        await store.write(await store.claim(A, name="l"), parts=(bytes(MAX_PART_BYTES + 1),))


async def test_nothing_of_an_answer_lies_open_and_moved_parts_do_not_open(store: Store) -> None:
    secret = b"a very secret answer"
    mine = await store.claim(A)
    await store.write(mine, parts=(secret, b"other"), committed=secret)
    names = await store.redis.execute("KEYS", f"{store.prefix}:*")
    for name in names:
        kind = await store.redis.execute("TYPE", name)
        held = {b"hash": ("HGETALL", name), b"list": ("LRANGE", name, 0, -1), b"zset": ("ZRANGE", name, 0, -1)}[kind]
        assert secret not in repr(await store.redis.execute(*held)).encode()
    parts = next(name for name in names if b"once-parts" in name)
    await store.redis.execute("LSET", parts, 0, (await store.redis.execute("LINDEX", parts, 1)))
    with pytest.raises(Internal):
        await store.claim(B)


@pytest.mark.parametrize("ended", [i.DONE, i.OPEN])
@pytest.mark.parametrize(("retention_s", "most"), [(-1, 600), (120, 120), (0, 60)])
async def test_a_tenants_retention_ends_a_record_earlier_once_it_runs_no_more(
    store: Store, retention_s: int, most: int, ended: str
) -> None:
    async def retention(tenant: TenantId) -> int:
        assert tenant == T
        return retention_s

    store.kept = IdempotencyRecords(store.redis, Sealer(bytes(32)), 600, store.prefix, retention=retention)
    mine = await store.claim()
    names = store.kept._keys(T, mine.request_id)[:2]
    assert await store.write(mine, state=i.RUNNING, first_part=0, parts=(b"a",))
    assert await store.redis.execute("TTL", names[0]) > 500  # what runs is not cut short
    assert await store.write(mine, state=ended, first_part=1, parts=(b"b",))
    assert all([most - 30 < await store.redis.execute("TTL", name) <= most for name in names])


async def test_records_end_are_counted_and_can_be_purged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_RECORDS", 2)
    mine = await store.claim(A)
    await store.write(mine, parts=(b"x",), state=i.DONE)
    ttls = [await store.redis.execute("TTL", name) for name in store.kept._keys(T, mine.request_id)[:2]]
    assert all(0 < ttl <= 600 for ttl in ttls)
    await store.claim(A, name="l")
    with pytest.raises(QuotaExceeded):
        await store.claim(A, name="m")
    await store.claim(A, name="m", tenant=OTHER)
    assert await store.kept.purge(T) == 2
    with pytest.raises(NotFound):
        await store.claim(A, resume=True)
    assert await store.redis.execute("KEYS", f"{store.prefix}:{{acme}}*") == []


async def test_an_answer_over_the_tenants_bytes_is_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 1000)
    first, second = await store.claim(A), await store.claim(A, name="l")
    assert await store.write(first, parts=(bytes(300),))
    assert await store.write(second, parts=(bytes(300),))
    assert await store.write(second, first_part=1, parts=(bytes(600),))  # too much, and it goes on
    assert await store.write(second, first_part=40, parts=(b"x",), state=i.DONE)
    assert await store.write(second, first_part=40, parts=(b"x",), state=i.DONE)  # again
    assert await store.write(first, first_part=1, parts=(bytes(600),), state=i.DONE)  # what the other had is free
    assert (await store.claim(B)).outcome == i.DONE
    again = await store.claim(B, name="l")
    assert (again.outcome, again.run, again.parts) == (i.YOURS, 2, ())
    assert await store.write(again, who=B, parts=(bytes(600),), state=i.DONE)  # too much at once
    third = await store.claim(A, name="l")
    assert (third.outcome, third.run) == (i.YOURS, 3)
    assert await store.write(third, parts=(b"",), state=i.DONE)
    assert (await store.claim(A, name="l")).outcome == i.DONE


async def test_bytes_of_records_that_ended_are_free(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 1000)
    old, new = await store.claim(A), await store.claim(A, name="l")
    await store.write(old, parts=(bytes(800),), state=i.DONE)
    record, parts, index, sizes, _ = store.kept._keys(T, old.request_id)
    await store.redis.execute("DEL", record, parts)
    await store.redis.execute("ZADD", index, 1, old.request_id)  # its time is over
    assert await store.write(new, parts=(bytes(800),), state=i.DONE)
    assert (await store.claim(B, name="l")).outcome == i.DONE
    assert 800 < int(await store.redis.execute("HGET", sizes, "total")) < 1000


# ---------------------------------------------------------------------------------------------- lost ingresses


async def reserve(store: Store, request_id: str, who: IngressId, tokens: int = 100) -> None:
    await store.records.change_tenant(T, lambda old: old, create=True)
    verdict, _, _ = await store.accounts.reserve(T, LIMITS, request_id, tokens, 600_000_000, ingress=who)
    assert verdict.reason == "ok"


async def held(store: Store) -> int:
    return int((await store.accounts.quota(T))["held"])


def settle_of(request_id: str, epoch: int, tokens: int) -> Settle:
    attempt = Attempt(RequestId(request_id), Epoch(epoch))
    return Settle(attempt=attempt, grant=SignedGrant(b"", b""), prompt_tokens=10, completion_tokens=tokens)


async def test_what_a_dead_ingress_held_goes_back_once_and_others_keep_theirs(store: Store) -> None:
    await reserve(store, "r1", A)
    await reserve(store, "r2", B)
    for _ in range(2):
        await store.lost.sweep()
    assert await held(store) == 200
    store.now += LEASE_S / 2
    store.watch.heard(B, store.now)
    store.now += LEASE_S / 2 + 1
    for _ in range(2):
        await store.lost.sweep()
    assert await held(store) == 100
    row = await store.accounts.row(T, RequestId("r1"))
    assert (row["finish"], row["completion_tokens"]) == (FINISH, "0")
    assert not await store.accounts.row(T, RequestId("r2"))
    # it was only cut off: what it settles is what counts
    booked = await store.accounts.settle(T, LIMITS, "r1", settle_of("r1", 1, 5))
    assert booked.replaced
    usage = await store.accounts.usage(T)
    assert (usage["requests"], usage["completion_tokens"]) == ("1", "5")


async def test_one_found_dead_at_the_start_of_policy_is_swept_too(store: Store) -> None:
    await reserve(store, "r1", A)
    fresh = LostIngresses(
        store.records, store.accounts, (store.kept,), watch := IngressWatch(), LIMITS, lambda: store.now
    )
    await fresh.sweep()
    assert watch.quiet(store.now + 5.0) == [A]
    store.now += LEASE_S + 1
    await fresh.sweep()
    assert await held(store) == 0


async def test_a_keyed_request_is_settled_as_it_was_last_written(store: Store) -> None:
    mine = await store.claim(A)
    await reserve(store, mine.request_id, A)
    await store.write(mine, epoch=Epoch(1), prompt_tokens=10, completion_tokens=7)
    store.watch.heard(A, store.now)
    store.now += LEASE_S + 1
    await store.lost.sweep()
    assert await held(store) == 0
    usage = await store.accounts.usage(T)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["requests"]) == ("10", "7", "1")
    # a retry elsewhere replaces it
    second = await store.claim(B, lost=A)
    await reserve(store, second.request_id, B)
    await store.accounts.settle(T, LIMITS, second.request_id, settle_of(second.request_id, 1025, 9))
    usage = await store.accounts.usage(T)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["requests"]) == ("10", "9", "1")
    assert await held(store) == 0


async def test_a_request_taken_over_is_no_longer_the_dead_ones(store: Store) -> None:
    mine = await store.claim(A)
    await reserve(store, mine.request_id, A)
    await store.claim(B, lost=A)
    await reserve(store, mine.request_id, B)
    assert await held(store) == 100
    store.watch.heard(A, store.now)
    store.watch.heard(B, store.now + LEASE_S)
    store.now += LEASE_S + 1
    await store.lost.sweep()
    assert await held(store) == 100
    assert not await store.accounts.row(T, mine.request_id)


async def test_a_key_that_is_used_again_after_its_record_is_billed_again(store: Store) -> None:
    def settle_of(mine: i.IdempotencyState) -> Settle:
        grant = SignedGrant(b"", b"")
        attempt = Attempt(mine.request_id, Epoch(1))
        return Settle(attempt=attempt, grant=grant, prompt_tokens=10, completion_tokens=5, finish="stop")

    for _ in range(2):
        mine = await store.claim(A)
        assert (mine.outcome, mine.run) == (i.YOURS, 1)
        assert await store.write(mine, state=i.DONE, parts=(b"all",))
        await store.accounts.settle(T, LIMITS, str(mine.request_id), settle_of(mine))
        await store.kept.purge(T)
    usage = await store.accounts.usage(T)
    assert (usage["requests"], usage["completion_tokens"]) == ("2", "10")


async def test_a_run_of_an_earlier_life_of_a_record_may_not_write(store: Store) -> None:
    old = await store.claim(A)
    await store.kept.purge(T)
    new = await store.claim(A)
    assert (old.run, new.run) == (1, 1)
    assert not await store.write(old, state=i.DONE, parts=(b"old",))
    assert await store.kept.progress(T, old.request_id) is None
    assert await store.write(new, parts=(b"new",))
    assert (await store.claim(B)).parts == (b"new",)


async def test_a_hold_that_its_living_ingress_does_not_name_is_let_go(store: Store) -> None:
    unclaimed = UnclaimedHolds(store.records, store.accounts, store.watch, LIMITS, lambda: store.now)
    for name, ingress in (("named", A), ("late", A), ("never", A), ("silent", B)):
        await reserve(store, name, ingress)

    async def beats(until: float, *named: str) -> None:
        while store.now < until:
            store.now += 1.0
            store.watch.beat(A, [RequestId(name) for name in named], store.now)
            await unclaimed.sweep()

    await beats(store.now + UNCLAIMED_S - 1, "named")
    assert await held(store) == 400
    # the answer that granted it came late; from then on its time begins anew
    await beats(store.now + EVERY_S + 1, "named", "late")
    assert set(await store.accounts.held_by(T)) == {"named", "late", "silent"}
    assert await held(store) == 300
    await beats(store.now + UNCLAIMED_S - EVERY_S, "named")
    assert set(await store.accounts.held_by(T)) == {"named", "late", "silent"}
    await beats(store.now + 2 * EVERY_S, "named")
    assert set(await store.accounts.held_by(T)) == {"named", "silent"}
    assert not await store.accounts.row(T, RequestId("never"))
    # what is settled later counts
    assert (await store.accounts.settle(T, LIMITS, "never", settle_of("never", 1, 5))).replaced
    assert await held(store) == 200
