"""`/v1/responses/{id}`: stored responses looked at, gone on with, cancelled and deleted, as OpenAI has it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response

from services.gateway.answers import json_response
from services.gateway.auth import key_hash
from services.gateway.keep_alive import KeptAlive
from services.gateway.query import query
from services.gateway.response_store import Kept
from services.gateway.service import GatewayService
from services.gateway.stored import Stored
from services.gateway.stored_answer import StoredAnswer
from services.gateway.stored_request import StoredRequest, request_id_of
from shared.contracts import idempotency_messages as i
from shared.contracts.errors import InvalidInput, NotFound, Unavailable
from shared.contracts.ids import RequestId
from shared.contracts.messages import Identity
from shared.ingress.responses_items import page

PATH = "/v1/responses/{response_id}"
MAX_PAGE, PAGE = 100, 20
MAX_EVENT = 10**8 - 1
FLAG = ("false", "true")
CANCEL_S, CANCEL_POLL_S = 10.0, 0.1
"""How long, and how often, it is looked whether what was cancelled has ended."""


class StoredResponses:
    """Handlers of the routes."""

    def __init__(self, service: GatewayService, stored: Stored) -> None:
        self._service = service
        self._stored = stored
        self._store = stored.store

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(PATH, self.get, methods=["GET"])
        app.add_api_route(PATH, self.delete, methods=["DELETE"])
        app.add_api_route(f"{PATH}/cancel", self.cancel, methods=["POST"])
        app.add_api_route(f"{PATH}/input_items", self.input_items, methods=["GET"])

    async def get(self, request: Request, response_id: str) -> Response:
        """GET /v1/responses/{id}: the response as it is; with `stream`, its events behind `starting_after`."""
        hashed = key_hash(request.headers)
        identity = await self._service.authenticate(hashed)
        asked = query(request, stream=FLAG, starting_after=(MAX_EVENT, None), include_obfuscation=("false",))
        if asked["starting_after"] is not None and asked["stream"] != "true":
            raise InvalidInput("starting_after is only allowed with stream=true", param="starting_after")
        request_id = _request_id(response_id)
        kept = await self._store.look(hashed, request_id)
        if asked["stream"] == "true":
            return await self._stream(identity, hashed, request_id, kept, asked["starting_after"])
        if kept.final is not None:
            return json_response(kept.final)
        return json_response(_now(kept, await self._made_from(hashed, request_id)))

    async def delete(self, request: Request, response_id: str) -> Response:
        """DELETE /v1/responses/{id}: it is forgotten; one that runs in the background ends."""
        hashed = key_hash(request.headers)
        await self._service.authenticate(hashed)
        await self._store.delete(hashed, _request_id(response_id))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """POST /v1/responses/{id}/cancel: one in the background ends; one that has ended stays as it is."""
        hashed = key_hash(request.headers)
        identity = await self._service.authenticate(hashed)
        request_id = _request_id(response_id)
        kept = await self._store.look(hashed, request_id)
        if kept.final is not None:
            _require_background(bool(kept.final.get("background")))
            return json_response(kept.final)
        made_from = await self._made_from(hashed, request_id)
        _require_background(made_from.background)
        await self._store.cancel(hashed, request_id)
        return json_response(_now(await self._ended(identity, hashed, request_id, made_from), made_from))

    async def input_items(self, request: Request, response_id: str) -> Response:
        """GET /v1/responses/{id}/input_items: what it was made from: limit, order, after, before."""
        hashed = key_hash(request.headers)
        await self._service.authenticate(hashed)
        asked = query(request, limit=(MAX_PAGE, PAGE), order=("desc", "asc"), after=None, before=None)
        made_from = await self._made_from(hashed, _request_id(response_id))
        order = {"descending": asked["order"] == "desc", "after": asked["after"], "before": asked["before"]}
        try:
            found, more = page(made_from.items, limit=asked["limit"], **order)
        except LookupError as exc:
            raise InvalidInput(f"{exc}: there is no item of that id", param=str(exc)) from exc
        ids = {"first_id": found[0]["id"] if found else "", "last_id": found[-1]["id"] if found else ""}
        return json_response({"object": "list", "data": found, **ids, "has_more": more})

    # ------------------------------------------------------------------------------------------ inside

    async def _stream(
        self, identity: Identity, hashed: bytes, request_id: RequestId, kept: Kept, after: int | None
    ) -> Response:
        made_from = await self._made_from(hashed, request_id)
        if not (made_from.background and made_from.stream):
            message = "only a response that was created with background and stream can be streamed again"
            raise InvalidInput(message, param="stream")
        entry = await self._stored.follow(identity, hashed, made_from, cancelled=kept.found.cancelled)
        assert entry.state is not None
        headers = {"x-request-id": entry.state.request_id}
        answer = StoredAnswer(entry, headers, -1 if after is None else after)
        period_s = self._service.config.keep_alive_s
        return KeptAlive(answer, period_s, headers) if period_s else answer

    async def _made_from(self, hashed: bytes, request_id: RequestId) -> StoredRequest:
        """Raises NotFound also while a client still waits for it: it is stored once it has ended."""
        found = await self._store.request(hashed, request_id)
        if found is None:
            raise NotFound("the response is not stored, or not yet", param="response_id")
        return found

    async def _end(self, identity: Identity, hashed: bytes, kept: Kept, made_from: StoredRequest) -> None:
        """If nobody runs it, end what was cancelled here."""
        if kept.found.outcome == i.OPEN:
            with suppress(Unavailable):
                (await self._stored.follow(identity, hashed, made_from, cancelled=True)).detach()

    async def _ended(self, identity: Identity, hashed: bytes, request_id: RequestId, made_from: StoredRequest) -> Kept:
        """It, once it has ended; as it is when that takes long."""
        clock = asyncio.get_running_loop().time
        end = clock() + CANCEL_S
        while True:
            kept = await self._store.look(hashed, request_id)
            if kept.final is not None or clock() > end:
                return kept
            await self._end(identity, hashed, kept, made_from)
            await asyncio.sleep(CANCEL_POLL_S)


def _request_id(given: str) -> RequestId:
    found = request_id_of(given)
    if found is None:
        raise NotFound(f"there is no response {given[:64]!r}", param="response_id")
    return found


def _require_background(background: bool) -> None:
    if not background:
        raise InvalidInput("only a response created with background: true can be cancelled", param="response_id")


def _now(kept: Kept, made_from: StoredRequest) -> dict[str, Any]:
    if kept.final is not None:
        return kept.final
    status = "in_progress" if kept.found.completion_tokens else "queued"
    return {**made_from.response, "status": status}
