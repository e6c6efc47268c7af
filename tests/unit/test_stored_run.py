"""Runs of stored responses: what one in the background and one with a waiting client do when nobody reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway import keyed_run
from services.gateway.event_log import EventLog
from services.gateway.keyed_run import Begun, KeyedRun
from services.gateway.stored_request import StoredRequest
from services.gateway.stored_run import EVENTS_A_RUN, StoredRun, first_event
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts.errors import Unavailable
from shared.contracts.ids import IngressId, RequestId, TenantId


class _Session:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def cancel(self, reason: str) -> None:
        self.reasons.append(reason)


class _Policy:
    def __init__(self) -> None:
        self.states: list[str] = []
        self.away = False

    async def write(self, write: i.IdempotencyWrite) -> i.IdempotencyWritten:
        if self.away:
            raise Unavailable("policy is away")
        self.states.append(write.state)
        return i.IdempotencyWritten(held=True)

    async def keep(self, news: r.ResponseInput) -> r.ResponseChanged:
        return r.ResponseChanged()


def stored_run(policy: _Policy, *, background: bool, run: int = 1) -> tuple[StoredRun, _Session]:
    state = i.IdempotencyState(request_id=RequestId("req-1"), outcome=i.YOURS, run=run, seed=0, created_s=0)
    made = StoredRun(policy.write, policy.keep, TenantId("acme"), IngressId("gw-1"), state)
    made.request = StoredRequest(b"n", {"background": background}, [], {})
    session: Any = _Session()
    made._begun = Begun(lambda *_: None, session)  # type: ignore[arg-type, return-value]
    return made, session


@pytest.mark.parametrize("background", [False, True])
def test_only_one_with_a_waiting_client_ends_with_it(background: bool) -> None:
    run, session = stored_run(_Policy(), background=background)
    run.cancel()
    assert session.reasons == ([] if background else ["client_gone"])


@pytest.mark.parametrize(
    ("background", "run", "begun", "state"),
    [
        (False, 1, True, i.REFUSED),
        (True, 1, False, i.REFUSED),  # its client is told
        (True, 1, True, i.OPEN),  # its client was told that it is queued
        (True, 2, False, i.OPEN),
    ],
)
async def test_what_cannot_go_on_stays_only_if_its_client_counts_on_it(
    background: bool, run: int, begun: bool, state: str
) -> None:
    policy = _Policy()
    made, _ = stored_run(policy, background=background, run=run)
    assert made._begun is not None
    made._begun = Begun(made._begun.response) if begun else None
    await made.release(Unavailable("away"))
    assert policy.states == [state]


async def test_what_policy_did_not_hear_of_is_let_go_of_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_run, "LATE_PAUSE_S", 0.01)
    policy = _Policy()
    made, _ = stored_run(policy, background=True, run=2)
    made._begun, policy.away = None, True
    await made.release(Unavailable("away"))
    assert policy.states == []
    policy.away = False
    await made.kept()
    assert policy.states == [i.OPEN]


async def test_an_answer_that_is_kept_late_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_run, "KEEP_S", 0.001)
    monkeypatch.setattr(keyed_run, "LATE_PAUSE_S", 0.01)
    kept, ending = EventLog(1), False

    async def write(write: i.IdempotencyWrite) -> i.IdempotencyWritten:
        nonlocal ending
        if write.state == i.DONE and not ending:
            ending = True
            await asyncio.sleep(0.02)  # longer than the pauses in which news are looked for
            raise Unavailable("policy is away")
        for part in write.parts:
            kept.feed(part)
        return i.IdempotencyWritten(held=True)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\ndata: 2\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: 3\n\n", "more_body": False})

    state = i.IdempotencyState(request_id=RequestId("req-1"), outcome=i.YOURS, run=1, seed=0, created_s=0)
    run = KeyedRun(write, TenantId("acme"), IngressId("gw-1"), state)
    await run.work(Begun(answer))
    await run.kept()
    assert kept.complete
    assert kept.events == run.log.events == [b"data: 1", b"data: 2", b"data: 3"]


def test_events_of_runs_have_numbers_of_their_own() -> None:
    assert [first_event(run) for run in (1, 2)] == [0, EVENTS_A_RUN]
