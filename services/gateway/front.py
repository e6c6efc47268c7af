"""What every request passes before the application, and every answer after it.

Here the key is asked for, so that no route can be a door without one: what is not on the public list needs it. A
request without a key that policy knows ends here, before its body is read, a span is begun or the router is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.answers import BODY_SEND, error_response, internal_response
from services.gateway.auth import KEY_NEEDED, key_hash
from services.gateway.service import GatewayService
from shared.contracts.errors import BatonError, Internal, InvalidInput, Unauthenticated
from shared.contracts.ids import new_request_id
from shared.contracts.messages import Identity
from shared.ingress.request_metrics import count_refused

log = logging.getLogger("baton.gateway")

PUBLIC = frozenset({"/", "/health", "/ready"})
PUBLIC_UNDER = "/console"
MAX_ECHO_CHARS = 128
REQUEST_ID = b"x-request-id"
ASKED_HEADERS = (
    *("authorization", "content-type", "idempotency-key", "last-event-id", "x-request-id"),
    *("x-api-key", "anthropic-version"),
)
TOLD_HEADERS = (
    "retry-after",
    "x-request-id",
    *(f"x-ratelimit-{what}-{limit}" for what in ("limit", "remaining", "reset") for limit in ("requests", "tokens")),
    *(f"x-ratelimit-{what}-parallel" for what in ("limit", "remaining")),
)
"""Of an answer's headers those that a page may read."""

KNOWN = "baton.known"
"""In a scope: whose key it is, and the key's hash."""
_Known = tuple[Identity, bytes]

Handler = Callable[[Request], Awaitable[Response]]


class Front:
    """ASGI around the application.

    Args:
        direct: handlers of POST by path, which answer without the application's own layers; each of those costs a
            request time, and a stream again for every token.
    """

    def __init__(self, app: ASGIApp, service: GatewayService, direct: Mapping[str, Handler] | None = None) -> None:
        self._app = app
        self._service = service
        self._direct = direct or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        known: _Known | None = None
        begun = False

        def sending(message: Message) -> Awaitable[None]:
            return send(message) if message["type"] != "http.response.start" else start(message)

        async def start(message: Message) -> None:
            nonlocal begun
            begun = True
            headers = _with_request_id(scope, message.get("headers", ()))
            if known is not None:
                limits = await self._service.rate_limits(*known)
                headers += [(name.encode(), value.encode()) for name, value in limits.items()]
            message["headers"] = headers
            await send(message)

        if not is_public(scope["path"]):
            try:
                scope[KNOWN] = known = await self._known(scope)
                self._require_plain(scope)
            except BatonError as error:
                await error_response(error)(scope, receive, sending)
                return
            if (handler := self._direct.get(scope["path"])) is not None and scope["method"] == "POST":
                scope.setdefault(BODY_SEND, send)
                try:
                    await (await handler(Request(scope, receive)))(scope, receive, sending)
                except Exception:
                    if not begun:
                        await internal_response({})(scope, receive, sending)
                    raise
                return
        await self._app(scope, receive, sending)

    async def _known(self, scope: Scope) -> _Known:
        """Who asks. Raises BatonError."""
        client = scope.get("client")
        try:
            hashed = key_hash(Headers(scope=scope))
            return await self._service.authenticate(hashed, client[0] if client else ""), hashed
        except BatonError as exc:
            error = Unauthenticated(KEY_NEEDED) if isinstance(exc, Unauthenticated) else exc
            count_refused(self._service.ingress.metrics, error)
            raise error from exc
        except Exception as exc:
            log.exception("a key could not be checked")
            raise Internal("internal error") from exc

    def _require_plain(self, scope: Scope) -> None:
        """Raises InvalidInput for a body that is packed: nobody here would unpack it."""
        given = next((value for name, value in scope["headers"] if name == b"content-encoding"), b"identity")
        if scope["method"] == "POST" and given.strip().lower() not in (b"identity", b""):
            message = "Content-Encoding: not supported; send the body as it is"
            error = InvalidInput(message, param="Content-Encoding", code="unsupported_encoding")
            count_refused(self._service.ingress.metrics, error)
            raise error


def _with_request_id(scope: Scope, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    headers = list(given)
    if all(name.lower() != REQUEST_ID for name, _ in headers):
        echo = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")[:MAX_ECHO_CHARS]
        headers.append((REQUEST_ID, echo or new_request_id().encode()))
    return headers


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, which pages of these origins may call from a browser. Keys come in a header, never in a cookie."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=ASKED_HEADERS,
        expose_headers=TOLD_HEADERS,
    )


def is_public(path: str) -> bool:
    """True for what needs no key: liveness, readiness, and the files of the console page."""
    return path in PUBLIC or path == PUBLIC_UNDER or path.startswith(PUBLIC_UNDER + "/")
