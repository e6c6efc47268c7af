"""What the gateway shows of itself and the stack: `/baton/*`, for `./baton trace`, `./baton top` and the console.

A tenant's key sees that tenant's traces and no other's; the cluster, which belongs to nobody, needs an admin key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from services.gateway.answers import json_response
from services.gateway.auth import key_hash
from services.gateway.service import GatewayService
from shared.contracts.errors import Forbidden, InvalidInput
from shared.contracts.messages import Identity
from shared.contracts.parts import SpanRecord
from shared.telemetry.trace_buffer import summarize
from shared.telemetry.trace_rows import length_s, trace_rows

MAX_TRACES = 200
NO_STORE = {"Cache-Control": "no-store"}


class Observer:
    """Handlers of the routes under `/baton`."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/baton/identity", self.identity, methods=["GET"])
        app.add_api_route("/baton/traces", self.traces, methods=["GET"])
        app.add_api_route("/baton/traces/{trace_id}", self.trace, methods=["GET"])
        app.add_api_route("/baton/cluster", self.cluster, methods=["GET"])

    async def identity(self, request: Request) -> Response:
        """GET /baton/identity: whose key this is."""
        identity = await self._identity(request)
        body = {"tenant": identity.tenant, "key_id": identity.key_id, "admin": identity.admin}
        return json_response(body, NO_STORE)

    async def traces(self, request: Request) -> Response:
        """GET /baton/traces?limit=20: the newest traces, one line each; a tenant's own, or an admin's all."""
        identity = await self._identity(request)
        limit = request.query_params.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 0 < int(limit) <= MAX_TRACES):
            raise InvalidInput(f"limit must be 1 to {MAX_TRACES}", param="limit")
        found = self._service.traces.recent(int(limit), _visible_to(identity))
        return json_response({"data": [_plain(summary) for summary in found]}, NO_STORE)

    async def trace(self, request: Request, trace_id: str) -> Response:
        """GET /baton/traces/{id}: one trace, by trace id, request id or response id.

        404 for another tenant's, as for one that never was.
        """
        identity = await self._identity(request)
        wanted = trace_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        spans = self._service.traces.get(wanted, _visible_to(identity))
        if not spans:
            raise HTTPException(404, "no such trace here")
        return json_response(trace_body(spans), NO_STORE)

    async def cluster(self, request: Request) -> Response:
        """GET /baton/cluster (admin): requests here, and what scheduler, ingresses and workers last said."""
        identity = await self._identity(request)
        if not identity.admin:
            raise Forbidden("this needs an admin key")
        await self._service.check_policy()
        return json_response(self._service.load(), NO_STORE)

    async def _identity(self, request: Request) -> Identity:
        return await self._service.authenticate(key_hash(request.headers))


def trace_body(spans: Sequence[SpanRecord]) -> dict[str, Any]:
    """A trace as JSON: `summary` (None while its root has not come), `rows` with reasons, and the spans themselves."""
    rows = trace_rows(spans)
    summary = summarize(spans)
    return {
        "trace_id": spans[0].trace_id,
        "summary": None if summary is None else _plain(summary),
        "length_s": length_s(rows),
        "rows": [_plain(row) for row in rows],
        "spans": [_plain(span) for span in spans],
    }


def _visible_to(identity: Identity) -> str | None:
    """The one tenant whose traces the key may see; None: all."""
    return None if identity.admin else identity.tenant


def _plain(struct: Any) -> Any:
    return msgspec.to_builtins(struct)
