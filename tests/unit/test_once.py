"""Keyed requests at one gateway: who reads which entry."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from services.gateway import keyed_run
from services.gateway.event_log import EventLog, make_parts
from services.gateway.keyed_run import Begun, KeyedRun
from services.gateway.once import Entry, Key, Once
from shared.bus.bus import NO_RESPONDERS
from shared.contracts import idempotency_messages as i
from shared.contracts.errors import Unavailable
from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.ingress.ingress import SHUTTING_DOWN

KEY = Key(TenantId("acme"), b"hash", b"name", b"body")
WAIT_S = 30.0


class _Policy:
    """Another gateway runs the request, until `done`."""

    def __init__(self) -> None:
        self.done = False
        self.asked = 0
        self.held = asyncio.Event()
        self.held.set()

    async def ask(self, claim: i.IdempotencyClaim) -> i.IdempotencyState:
        self.asked += 1
        state = self._state()
        await self.held.wait()
        return state

    def _state(self) -> i.IdempotencyState:
        log = EventLog(1)
        log.begin(200, stream=False)
        return i.IdempotencyState(
            request_id=RequestId("req-1"),
            outcome=i.DONE if self.done else i.RUNNING,
            run=1,
            seed=0,
            created_s=0,
            parts=tuple(make_parts(log, 0, [b"{}"], last=True)) if self.done else (),
        )


async def _write(write: i.IdempotencyWrite) -> i.IdempotencyWritten:
    raise AssertionError("it runs elsewhere")


async def _begin(run: KeyedRun) -> Begun:
    raise AssertionError("it runs elsewhere")


async def _until(entry: Entry) -> None:
    while not entry.log.complete:
        await entry.log.news()


async def test_who_comes_as_an_unread_entry_is_given_up_gets_the_answer() -> None:
    policy = _Policy()
    once = Once(policy.ask, _write, IngressId("gw-1"), linger_s=0.05)
    async with asyncio.timeout(WAIT_S):
        first = await once.enter(KEY, _begin)
        policy.held.clear()
        while policy.asked < 2:  # noqa: ASYNC110 - it looks again, and waits for policy
            await asyncio.sleep(0.01)
        first.detach()
        while not first.given_up:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        coming = asyncio.create_task(once.enter(KEY, _begin))
        await asyncio.sleep(0.01)
        policy.done = True
        policy.held.set()
        second = await coming
        await _until(second)
        second.detach()
    assert second.log.events == [b"{}"]


class _Lossy:
    """Policy, whose answers to the first claims are lost."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.claims: list[i.IdempotencyClaim] = []
        self.written: list[tuple[int, str]] = []

    async def ask(self, claim: i.IdempotencyClaim) -> i.IdempotencyState:
        self.claims.append(claim)
        if len(self.claims) <= self.lost:
            raise Unavailable("no answer in time")
        run = len(self.claims)
        return i.IdempotencyState(request_id=RequestId("req-1"), outcome=i.YOURS, run=run, seed=0, created_s=0)

    async def write(self, write: i.IdempotencyWrite) -> i.IdempotencyWritten:
        self.written.append((write.run, write.state))
        return i.IdempotencyWritten(held=True)


async def test_a_claim_whose_answer_was_lost_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_run, "LATE_PAUSE_S", 0.02)
    policy = _Lossy(lost=3)
    once = Once(policy.ask, policy.write, IngressId("gw-1"), linger_s=0.05)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):  # who comes again meanwhile claims nothing that would be given back then
            with pytest.raises(Unavailable):
                await once.enter(KEY, _begin)
        while once.entries:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert [claim.resume for claim in policy.claims] == [False, True, True, True]
    assert policy.written == [(4, i.OPEN)]


async def test_a_request_is_not_held_while_its_claim_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_run, "LATE_PAUSE_S", 10 * WAIT_S)
    once = Once(_Lossy(lost=1).ask, _write, IngressId("gw-1"), linger_s=0.05)
    requests: weakref.WeakSet[_Request] = weakref.WeakSet()
    for _ in range(2):
        await _refused(once, requests)
    gc.collect()
    assert once.entries == 1
    assert len(requests) == 0
    (entry,) = once._entries.values()
    assert entry.task is not None
    entry.task.cancel()
    await asyncio.wait({entry.task})


class _Request:
    async def begin(self, run: KeyedRun) -> Begun:
        raise AssertionError("nobody gave it a run")


async def _refused(once: Once, requests: weakref.WeakSet[_Request]) -> None:
    request = _Request()
    requests.add(request)
    with pytest.raises(Unavailable, match="no answer in time"):
        await once.enter(KEY, request.begin)


@pytest.mark.parametrize("code", [SHUTTING_DOWN, NO_RESPONDERS])
async def test_a_claim_that_nobody_heard_needs_no_giving_back(code: str) -> None:
    async def ask(claim: i.IdempotencyClaim) -> i.IdempotencyState:
        raise Unavailable("nobody", code=code)

    once = Once(ask, _write, IngressId("gw-1"), linger_s=0.05)
    with pytest.raises(Unavailable):
        await once.enter(KEY, _begin)
    assert once.entries == 0
