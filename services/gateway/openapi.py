"""`GET /openapi.json`: this API in OpenAPI's own words, made from the routes and types that answer.

A route that `OPERATIONS` does not know is described all the same, with what holds for every route. It needs a key, as
the routes it tells of do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.routing import BaseRoute, Route

from services.gateway.answer_schemas import answer_schemas, refer
from services.gateway.answers import json_response
from services.gateway.auth import key_hash
from services.gateway.front import is_public
from services.gateway.message_schemas import message_schemas
from services.gateway.openapi_operations import OPERATIONS, UNKNOWN, Operation, body_schemas
from services.gateway.response_events import response_event_schemas
from services.gateway.response_schemas import response_schemas
from services.gateway.service import GatewayService
from shared.version import VERSION

PATH = "/openapi.json"
OPENAPI = "3.1.0"
ERRORS = {
    400: "The request cannot be run as it is; `param` names what is at fault.",
    401: "No key, or one that is not known.",
    403: "The key may not do this.",
    404: "There is no such thing, or it is another's.",
    409: "It is not in a state that allows this.",
    413: "The body is too large.",
    422: "The Idempotency-Key stands for another body.",
    429: "Over a limit, which the message names; or too many unknown keys from this address.",
    431: "The request's head is too large.",
    499: "The request was cancelled.",
    500: "A fault of this server.",
    503: "No capacity, a restart, or a part that does not answer; retry after a while.",
    504: "The request was not begun in time.",
}
EVERYWHERE = (431, 500)
WITH_KEY = (401, 429, 503)
_NO_BODY = frozenset({204, 304, 307})
_LIMITS = [
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    *(f"x-ratelimit-{what}-parallel" for what in ("limit", "remaining")),
]


class Description:
    """Handler of the route. The document is made at the first request for it: by then every route is there."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._document: dict[str, Any] = {}

    def add_to(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, self.get, methods=["GET"])

    async def get(self, request: Request) -> Response:
        """GET /openapi.json: this document."""
        await self._service.authenticate(key_hash(request.headers))
        if not self._document:
            self._document = document(request.app.routes)
        return json_response(self._document)


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of an application's routes."""
    paths: dict[str, dict[str, Any]] = {}
    for path, method, route in _listed(routes):
        operation = OPERATIONS.get((method, path), UNKNOWN)
        paths.setdefault(path, {})[method.lower()] = _operation(path, method, route, operation)
    return {
        "openapi": OPENAPI,
        "info": {"title": "Baton", "version": VERSION, "description": "OpenAI's API, and what it tells of itself."},
        "paths": paths,
        "components": {
            "schemas": {
                **answer_schemas(),
                **response_schemas(),
                **response_event_schemas(),
                **message_schemas(),
                **body_schemas(),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _listed(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, Route]]:
    for route in routes:
        if isinstance(route, Route):
            for method in sorted(route.methods or ()):
                yield route.path_format, method, route


def _operation(path: str, method: str, route: Route, operation: Operation) -> dict[str, Any]:
    public = is_public(path)
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}{path}",
        "summary": inspect.cleandoc(route.endpoint.__doc__ or path).splitlines()[0],
        "security": [] if public else [{"key": []}],
        "parameters": [*_path_parameters(route, operation), *operation.parameters],
        "responses": _responses(method, operation, public),
    }
    if operation.body is not None:
        described["requestBody"] = {"required": operation.body_required, "content": operation.body}
    return described


def _path_parameters(route: Route, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in route.param_convertors:
        schema = operation.path_schema or {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _responses(method: str, operation: Operation, public: bool) -> dict[str, Any]:
    told = {str(status): _answer(method, status, content, public) for status, content in operation.answers.items()}
    for status in {*EVERYWHERE, *(() if public else WITH_KEY), *operation.errors}:
        # a head that is too large ends before anybody knows its route
        schema = "Error" if status == 431 else operation.error
        told.setdefault(str(status), _error(method, status, public, schema))
    return dict(sorted(told.items()))


def _answer(method: str, status: int, content: dict[str, Any], public: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "The answer.", "headers": _headers(status, public)}
    return answer if method == "HEAD" or status in _NO_BODY else {**answer, "content": content}


def _error(method: str, status: int, public: bool, schema: str) -> dict[str, Any]:
    error: dict[str, Any] = {"description": ERRORS[status], "headers": _headers(status, public)}
    return (
        error
        if method == "HEAD"
        else {**error, "content": {"application/json": {"schema": refer(schema) if schema else {}}}}
    )


def _headers(status: int, public: bool) -> dict[str, Any]:
    headers = {} if status == 431 else {"X-Request-Id": _header(required=True)}
    if status == 401:
        headers["WWW-Authenticate"] = _header(required=True)
    if status in (429, 503):
        headers["Retry-After"] = _header(required=False)
    if not public:
        headers |= {name: _header(required=False) for name in _LIMITS}
    return headers


def _header(*, required: bool) -> dict[str, Any]:
    return {"required": required, "schema": {"type": "string"}}
