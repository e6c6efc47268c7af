"""Comments in a stream that is silent: in the queue, in prefill, and while another gateway answers.

Proxies and clients give a connection up that says nothing. Until the first comment a stream that fails has a status of
its own; after it, the failure is the stream's last frame.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.answers import BODY_SEND, SSE_HEADERS
from shared.ingress.request_plan import RequestPlan

COMMENT = b": keep-alive\n\n"
DATA, FRAME_END = b"data: ", b"\n\n"


def kept_alive(answer: Response, plan: RequestPlan, period_s: float, headers: Mapping[str, str]) -> Response:
    """`answer`, with comments if it is a stream and `period_s` is not 0; see `KeptAlive`."""
    return KeptAlive(answer, period_s, headers) if plan.stream and period_s else answer


class KeptAlive(Response):
    """A stream's answer, with a comment wherever it says nothing for `period_s`.

    Args:
        answer: sends a stream, or an error as one JSON body.
        headers: of the answer, if a comment is the first of it.
    """

    def __init__(self, answer: ASGIApp, period_s: float, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._answer = answer
        self._period_s = period_s
        self._extra = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _Stream(send, scope.get(BODY_SEND, send), {**SSE_HEADERS, **self._extra})
        scope[BODY_SEND] = stream.send
        stream.begin(self._period_s)
        try:
            await self._answer(scope, receive, stream.send)
        finally:
            stream.end()


class _Stream:
    def __init__(self, send: Send, send_body: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._send_body = send_body
        self._headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        self._said = time.monotonic()
        self._begun = False  # by a comment or by the answer
        self._plain = False  # the answer's head went out as it was, and nothing of its body is to be changed
        self._head: Message | None = None  # the answer's, which came behind a comment
        self._body = b""
        self._busy = False
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._commenting: asyncio.Task[None] | None = None

    def begin(self, period_s: float) -> None:
        """Say something wherever nothing is said for so long, from now on."""
        self._period_s = period_s
        self._timer = self._loop.call_later(period_s, self._look)

    def end(self) -> None:
        """Say nothing more."""
        self._over = True
        self._timer.cancel()
        if self._commenting is not None:
            self._commenting.cancel()

    def _look(self) -> None:
        now = time.monotonic()
        silent_s = now - self._said
        if silent_s >= self._period_s and not self._over:
            self._said, silent_s = now, 0.0
            if not self._busy and (self._commenting is None or self._commenting.done()):  # else it does not read
                self._commenting = self._loop.create_task(self._comment())
        if not self._over:
            self._timer = self._loop.call_later(self._period_s - silent_s, self._look)

    async def send(self, message: Message) -> None:
        self._busy = True
        try:
            if self._commenting is not None:
                await asyncio.wait({self._commenting})  # the head goes first, whoever sends it
                self._commenting = None
            if self._plain and message["type"] == "http.response.body":
                self._over = not message.get("more_body", False)
                await self._send_body(message)
            else:
                await self._forward(message)
        finally:
            self._said = time.monotonic()
            self._busy = False

    async def _comment(self) -> None:
        if self._busy or self._over:  # since
            return
        if not self._begun:
            self._begun = True
            self._head = {}
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._head is None:
                self._begun = self._plain = True
                await self._send(message)
            else:
                self._head = message
                self._plain = message["status"] == 200
            return
        self._over = not message.get("more_body", False)
        self._body += message.get("body", b"")  # an error: its last frame
        if self._over:
            frame = DATA + self._body + FRAME_END
            await self._send({"type": "http.response.body", "body": frame, "more_body": False})
