"""Comments and the answer they stand in for: one head, and before everything else, however slowly it goes out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.answers import BODY_SEND
from services.gateway.keep_alive import COMMENT, KeptAlive

PERIOD_S = 0.02


def body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.mark.parametrize("direct", [False, True])
async def test_what_comes_while_the_comments_head_is_under_way_waits_for_it(direct: bool) -> None:
    sent: list[Any] = []
    head_begun, head_may_go = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            head_begun.set()
            await head_may_go.wait()
            sent.append(message["status"])
        else:
            sent.append(message["body"])

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.wait_for(head_begun.wait(), 30)  # a comment's: nothing was sent yet
        asyncio.get_running_loop().call_later(PERIOD_S, head_may_go.set)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await scope.get(BODY_SEND, send)(body(b"one"))
        await scope.get(BODY_SEND, send)(body(b"two", more=False))

    scope: dict[str, Any] = {BODY_SEND: send} if direct else {}
    await KeptAlive(answer, PERIOD_S, {})(scope, None, send)  # type: ignore[arg-type]
    await asyncio.sleep(3 * PERIOD_S)
    assert sent == [200, COMMENT, b"one", b"two"]


async def test_nothing_is_said_once_the_answer_is_over() -> None:
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", message.get("status")))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(body(b"one", more=False))
        await asyncio.sleep(5 * PERIOD_S)  # what an answer still does behind its last byte

    await KeptAlive(answer, PERIOD_S, {})({}, None, send)  # type: ignore[arg-type]
    assert sent == [200, b"one"]
