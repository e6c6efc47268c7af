"""`/v1/batches`: OpenAI's batches, which the batch service drives."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from services.gateway.answers import json_response
from services.gateway.auth import key_hash
from services.gateway.body import read_body
from services.gateway.files import list_body
from services.gateway.keyed import Keyed
from services.gateway.query import query
from services.gateway.service import GatewayService
from services.gateway.upload import MAX_EXPIRY_S, MIN_EXPIRY_S
from shared.contracts import batch_messages as b
from shared.contracts import subjects
from shared.contracts.ids import BatchId, FileId
from shared.contracts.messages import Identity
from shared.ingress.metadata import Metadata
from shared.ingress.parse import parse_as
from shared.security.keeping import kept_s

MAX_BODY_BYTES = 256 * 1024
MAX_PAGE, PAGE = 100, 20


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ExpiresAfter(_Strict):
    """When output and error file go, counted from their own creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class BatchBody(_Strict):
    """POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=100)
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: ExpiresAfter | None = None


class Batches:
    """Handlers of the routes under `/v1/batches`."""

    def __init__(self, service: GatewayService, keyed: Keyed) -> None:
        self._service = service
        self._keyed = keyed

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/v1/batches", self.create, methods=["POST"])
        app.add_api_route("/v1/batches", self.list, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}", self.get, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"])

    async def create(self, request: Request) -> Response:
        """POST /v1/batches. Answered while its lines are yet to be validated; under an Idempotency-Key once."""
        self._service.ingress.require_open()
        hashed = key_hash(request.headers)
        identity = await self._service.authenticate(hashed)
        length, timeout_s = request.headers.get("content-length"), self._service.config.body_timeout_s
        data = await read_body(request.stream(), length, MAX_BODY_BYTES, timeout_s)
        body = parse_as(BatchBody, data)
        message = b.BatchCreate(
            tenant=identity.tenant,
            input_file_id=FileId(body.input_file_id),
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            metadata=body.metadata or {},
            output_expires_after_s=kept_s(
                body.output_expires_after.seconds if body.output_expires_after else 0, identity.retention_s
            ),
            enqueued_tokens_limit=identity.limits.batch_enqueued_tokens,
            models=identity.models,
        )
        key = await self._keyed.key_of(request, identity.tenant, hashed, data)
        if key is None:
            return json_response(batch_body(await self._ask(message)))

        async def make(request_id: str) -> dict[str, Any]:
            batch_id = BatchId(f"batch-{request_id.removeprefix('req-')}")
            return batch_body(await self._ask(msgspec.structs.replace(message, batch_id=batch_id)))

        return await self._keyed.whole(key, make)

    async def list(self, request: Request) -> Response:
        """GET /v1/batches: after, limit."""
        identity = await self._identity(request)
        asked = query(request, limit=(MAX_PAGE, PAGE), after=None)
        message = b.BatchList(tenant=identity.tenant, after=asked["after"], limit=asked["limit"])
        page: b.BatchPage = await self._ask(message)
        return json_response(list_body([batch_body(info) for info in page.batches], page.has_more))

    async def get(self, request: Request, batch_id: str) -> Response:
        """GET /v1/batches/{id}"""
        identity = await self._identity(request)
        return json_response(
            batch_body(await self._ask(b.BatchGet(tenant=identity.tenant, batch_id=BatchId(batch_id))))
        )

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """POST /v1/batches/{id}/cancel"""
        identity = await self._identity(request)
        message = b.BatchCancel(tenant=identity.tenant, batch_id=BatchId(batch_id))
        return json_response(batch_body(await self._ask(message)))

    async def _identity(self, request: Request) -> Identity:
        return await self._service.authenticate(key_hash(request.headers))

    async def _ask(self, message: b.BatchRequest) -> Any:
        return await self._service.ask(subjects.BATCH_JOBS, message, b.BatchReply)


def batch_body(info: b.BatchInfo) -> dict[str, Any]:
    """A batch in OpenAI's form; `dead_letters`, ours, only where there are some."""
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    body: dict[str, Any] = {
        "id": info.batch_id,
        "object": "batch",
        "endpoint": info.endpoint,
        "model": info.model or None,
        "errors": {"object": "list", "data": [_error(error) for error in info.errors]} if info.errors else None,
        "input_file_id": info.input_file_id,
        "completion_window": info.completion_window,
        "status": info.status,
        "output_file_id": info.output_file_id or None,
        "error_file_id": info.error_file_id or None,
        "created_at": info.created_s,
        "expires_at": info.expires_s or None,
        **{f"{name}_at": getattr(info, f"{name}_s") or None for name in times},
        "request_counts": {"total": info.total, "completed": info.completed, "failed": info.failed},
        "usage": {
            "input_tokens": info.prompt_tokens,
            "input_tokens_details": {"cached_tokens": info.cached_tokens},
            "output_tokens": info.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": info.prompt_tokens + info.completion_tokens,
        },
        "metadata": info.metadata or None,
    }
    if info.dead_letters:
        body["dead_letters"] = [
            {"custom_id": letter.param, "line": letter.line, "code": letter.code, "message": letter.message}
            for letter in info.dead_letters
        ]
    return body


def _error(error: b.BatchError) -> dict[str, Any]:
    return {
        "code": error.code,
        "message": error.message,
        "line": error.line or None,
        "param": error.param or None,
    }
