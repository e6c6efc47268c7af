"""Answers under `/v1/messages` in the form of Anthropic's API, wherever in the gateway they were made.

Errors come from the key's check, from routes, and in streams from whoever tells a client about its end. All are made in
one form; here they get that of this API. A keep-alive comment becomes a `ping`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.answers import BODY_SEND
from services.gateway.front import REQUEST_ID
from services.gateway.keep_alive import COMMENT
from shared.ingress.messages_body import error_as_message

PATH = "/v1/messages"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_ERROR = re.compile(rb'^data: (\{"error":.*\})$', re.MULTILINE)


class MessagesFront:
    """ASGI around everything of the gateway's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] == PATH or scope["path"].startswith(PATH + "/")):
            send = _Answer(send).send
            scope[BODY_SEND] = send
        await self._app(scope, receive, send)


class _Answer:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._error: Message | None = None  # the head of one, until its body is here

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._error is not None:
            head, self._error = self._error, None
            body = _error_body(message.get("body", b""), head["status"])
            length = (b"content-length", str(len(body)).encode())
            head["headers"] = [(n, v) for n, v in head["headers"] if n.lower() != b"content-length"] + [length]
            await self._send(head)
            await self._send({**message, "body": body})
        else:
            await self._send({**message, "body": _events(message.get("body", b""))} if "body" in message else message)

    async def _start(self, message: Message) -> None:
        headers = list(message.get("headers", ()))
        # the name this API's clients read the request's id by
        headers += [(b"request-id", value) for name, value in headers if name.lower() == REQUEST_ID]
        message = {**message, "headers": headers}
        if message["status"] >= 400:
            self._error = message
        else:
            await self._send(message)


def _error_body(body: bytes, status: int) -> bytes:
    return json.dumps(error_as_message(json.loads(body), status)).encode()


def _events(body: bytes) -> bytes:
    if body == COMMENT:
        return PING
    return _ERROR.sub(_error_event, body) if b'{"error":' in body else body


def _error_event(found: re.Match[bytes]) -> bytes:
    error: Any = json.loads(found[1])
    return b"event: error\ndata: " + json.dumps(error_as_message(error)).encode()
