"""Answers to clients of HTTP/1.0, who know no chunks: one whose length nobody knows ends with its connection."""

from __future__ import annotations

from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """`app`, whose answer in `cycle` is sent as it is, as the server would put one without a length into chunks."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        has_length = False

        async def plain(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # the server counts what comes down from here, and wants zero in the end
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return answer
