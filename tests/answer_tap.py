"""Answers of a gateway, taken where it gives them to its connections, whoever asked and however."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol

PUBLIC = "/v1/"
JSON, STREAM = "application/json", "text/event-stream"
CONTENT_TYPE, REQUEST_ID = b"content-type", b"x-request-id"
MAX_BODY_BYTES = 16 << 20


class Taking(Protocol):
    """One answer being taken, in this order, as far as it comes."""

    def head(self, status: int, kind: str, request_id: str) -> None: ...

    def body(self, data: bytes, *, whole: bool) -> None: ...

    def over(self) -> None: ...


Take = Callable[[str, str], Taking]
"""Called with method and path when an answer may come."""


@dataclass
class Answer:
    """One answer as far as it came. `whole`: nothing is missing at its end."""

    method: str
    path: str
    status: int = 0
    kind: str = ""
    request_id: str = ""
    content: bytearray = field(default_factory=bytearray)
    whole: bool = False
    keep: Callable[[Answer], None] = field(default=lambda answer: None, repr=False)
    """Told when it is over."""

    def head(self, status: int, kind: str, request_id: str) -> None:
        self.status, self.kind, self.request_id = status, kind, request_id

    def body(self, data: bytes, *, whole: bool) -> None:
        self.content += data
        self.whole = whole

    def over(self) -> None:
        self.keep(self)

    @property
    def judged(self) -> bool:
        """Whether it can be looked at: of what broke off, only a stream's events."""
        stream = self.kind.startswith(STREAM)
        return self.method != "HEAD" and len(self.content) < MAX_BODY_BYTES and (self.whole or stream)


def watch_gateways(take: Take) -> None:
    """Take the answers of gateways that this process serves from now on."""
    from services.gateway import connection
    from services.gateway.server import Listener

    closing, http_body = Listener.closing, connection.http_body

    @wraps(closing)
    def watched(self: Listener, app: Any) -> Any:
        return tapped(closing(self, app), take)

    @wraps(http_body)
    def refusal(status: int, message: str) -> Any:
        """What a connection answers to what is no request: it has no path yet, and never comes to the application."""
        body = http_body(status, message)
        taking = take("", PUBLIC)
        taking.head(status, JSON, "")
        taking.body(json.dumps(body).encode(), whole=True)
        taking.over()
        return body

    Listener.closing = watched  # type: ignore[method-assign]
    connection.http_body = refusal


def tapped(app: Any, take: Take) -> Any:
    """`app`, whose answers under PUBLIC are taken before they are sent."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PUBLIC):
            await app(scope, receive, send)
            return
        taking = take(scope["method"], scope["path"])

        def sending(message: Any) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                kind, request_id = (headers.get(name, b"").decode("latin-1") for name in (CONTENT_TYPE, REQUEST_ID))
                taking.head(message["status"], kind, request_id)
            else:
                taking.body(message.get("body", b""), whole=not message.get("more_body", False))
            return send(message)  # type: ignore[no-any-return]

        try:
            await app(scope, receive, sending)
        finally:
            taking.over()

    return wrapped
