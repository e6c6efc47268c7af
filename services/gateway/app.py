"""The HTTP door: routes, and the order in which a request is checked.

Key before body, body before prompt, prompt before quota. Every error, also of routing, has OpenAI's shape.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.telemetry import TelemetryConfig
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp

from services.gateway.answers import SessionResponse, error_response, internal_response, json_response
from services.gateway.auth import key_hash
from services.gateway.batches import Batches
from services.gateway.body import read_body
from services.gateway.console_files import ConsoleFiles
from services.gateway.dialect import CHUNKS, MESSAGES, Dialect, ResponsesDialect
from services.gateway.errors import http_body
from services.gateway.files import Files
from services.gateway.front import KNOWN, Front, with_cors
from services.gateway.keep_alive import kept_alive
from services.gateway.keyed import Keyed
from services.gateway.messages_front import PATH as MESSAGES_PATH
from services.gateway.messages_front import MessagesFront
from services.gateway.observe import Observer
from services.gateway.openapi import Description
from services.gateway.opening import open_plans
from services.gateway.planning import tokenized
from services.gateway.service import GatewayService
from services.gateway.stored import Asker, Stored
from services.gateway.stored_routes import StoredResponses
from services.gateway.token_routes import TokenRoutes
from shared.contracts.errors import BatonError, Cancelled
from shared.ingress.error_body import as_baton_error
from shared.ingress.failed_span import end_failed
from shared.ingress.messages_request import parse_messages
from shared.ingress.openai_schema import CompletionRequest, GenerationRequest
from shared.ingress.parse import parse_chat, parse_completion
from shared.ingress.request_metrics import count_refused
from shared.ingress.responses_request import parse_responses
from shared.ingress.served_models import ServedModel
from shared.telemetry import attributes as a

log = logging.getLogger("baton.gateway")

MAX_ECHO_CHARS = 128
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""FastAPI's own would join the trace a client names, and tell of paths and headers what nobody redacts."""

_TRACE_PARENT = TraceContextTextMapPropagator()

Parse = Callable[[bytes], tuple[GenerationRequest, Dialect]]


class Door:
    """Handlers of the routes."""

    def __init__(self, service: GatewayService) -> None:
        self.service = self._service = service
        self._started = int(time.time())
        self.keyed = Keyed(service)
        self.stored = Stored(service, self.keyed)
        self.stored_responses = StoredResponses(service, self.stored)
        self.files = Files(service, self.keyed)
        self.batches = Batches(service, self.keyed)
        self.observer = Observer(service)
        self.tokens = TokenRoutes(service)

    # ------------------------------------------------------------------------------------------ generation

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._generate(request, "chat", lambda body: (parse_chat(body), CHUNKS))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._generate(request, "completions", lambda body: (parse_completion(body), CHUNKS))

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses"""
        return await self._generate(request, "responses", _parse_responses)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages"""
        return await self._generate(request, "messages", lambda body: (parse_messages(body), MESSAGES))

    async def _generate(self, request: Request, kind: str, parse: Parse) -> Response:
        arrived = time.monotonic()
        span = self._service.telemetry.tracer.start_span(
            "gateway.request", context=Context(), links=_client_links(request), attributes={a.KIND: kind}
        )
        token = otel_context.attach(trace.set_span_in_context(span))
        echo = _echo(request)
        try:
            return await self._open(request, parse, span, arrived, echo)
        except ClientDisconnect:
            self._refuse(span, Cancelled("the client left", code="client_gone"))
            return error_response(Cancelled("the client left"), echo)
        except BatonError as error:
            self._refuse(span, error)
            return error_response(error, echo)
        except Exception as exc:
            log.exception("a request failed")
            self._refuse(span, as_baton_error(exc))
            return internal_response(echo)
        finally:
            otel_context.detach(token)

    def _refuse(self, span: Span, error: BatonError) -> None:
        count_refused(self._service.ingress.metrics, error)
        end_failed(span, error)

    async def _open(self, request: Request, parse: Parse, span: Span, arrived: float, echo: dict[str, str]) -> Response:
        service = self._service
        service.ingress.require_open()
        identity, hashed = request.scope[KNOWN]
        span.set_attribute(a.TENANT, identity.tenant)
        config = service.config
        length = request.headers.get("content-length")
        body = await read_body(request.stream(), length, config.max_body_bytes, config.body_timeout_s)
        span.set_attribute(a.BODY_BYTES, len(body))
        parsed, dialect = await service.models.parse(parse, body)
        if isinstance(dialect, ResponsesDialect):
            parsed, dialect = await self.stored.continued(dialect, hashed, parsed)
        model = service.models.get(parsed.model, identity.models)
        span.set_attribute(a.MODEL, model.name)
        plans_of = await tokenized(service, parsed, model, identity, dialect)
        key = await self.keyed.key_of(request, identity.tenant, hashed, body)
        if isinstance(dialect, ResponsesDialect) and self.stored.wanted(dialect):
            asker = Asker(identity.tenant, hashed, span, arrived)
            return await self.stored.create(dialect, plans_of, asker, key, echo)
        if key is not None:
            return await self.keyed.generate(key, plans_of, span=span, arrived=arrived, headers=echo, dialect=dialect)
        plans = plans_of(secrets.randbits(64))
        answered = await open_plans(service, plans, hashed, span=span, arrived=arrived)
        headers = {"x-request-id": answered.request_id} | echo
        return kept_alive(SessionResponse(answered, headers, dialect), plans[0], config.keep_alive_s, headers)

    async def probe(self) -> bool:
        """Send one token of each model through all services with the gateway's own key. True when all came."""
        return all([await self._probe(model) for model in self._service.models])

    async def _probe(self, model: ServedModel) -> bool:
        config = self._service.config
        body = {"model": model.name, "prompt": "Hello", "max_tokens": 1}  # not every model has a chat template
        arrived = time.monotonic()
        span = self._service.telemetry.tracer.start_span("gateway.request", context=Context())
        token = otel_context.attach(trace.set_span_in_context(span))
        try:
            hashed = key_hash({"authorization": f"Bearer {config.probe_key}"})
            identity = await self._service.authenticate(hashed)
            plans_of = await tokenized(self._service, CompletionRequest.model_validate(body), model, identity)
            plans = plans_of(secrets.randbits(64))
            session = await open_plans(self._service, plans, hashed, span=span, arrived=arrived)
        except BatonError as error:
            end_failed(span, error)
            log.info("not ready: %s", error.message)
            return False
        finally:
            otel_context.detach(token)
        while session.end is None:
            await session.wait()
            session.take()
        return session.end.error is None

    # ------------------------------------------------------------------------------------------ the rest

    async def models(self, request: Request) -> Response:
        """GET /v1/models: those the key may use."""
        identity = await self._service.authenticate(key_hash(request.headers))
        found = self._service.models.open_to(identity.models)
        return json_response({"object": "list", "data": [self._model(model) for model in found]}, _echo(request))

    async def model(self, request: Request, model_id: str) -> Response:
        """GET /v1/models/{id}"""
        identity = await self._service.authenticate(key_hash(request.headers))
        return json_response(self._model(self._service.models.get(model_id, identity.models)), _echo(request))

    def _model(self, model: ServedModel) -> dict[str, Any]:
        owner = "baton, fake workers" if self._service.cluster.has_fake_workers(model.pool) else "baton"
        return {"id": model.name, "object": "model", "created": self._started, "owned_by": owner}

    async def health(self) -> Response:
        """GET /health: the process answers."""
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: a request would be served now."""
        await self._service.check_policy()
        checks = self._service.checks()
        ready = all(checks.values())
        body = {"status": "ready" if ready else "not ready", "checks": checks}
        return json_response(body, None if ready else {"Retry-After": "1"}, 200 if ready else 503)


def build_app(door: Door) -> ASGIApp:
    """The application behind its front. Its description is its own: FastAPI knows neither bodies nor answers."""
    app = FastAPI(
        title="Baton", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, telemetry=NO_TELEMETRY
    )
    direct = {
        "/v1/chat/completions": door.chat,
        "/v1/completions": door.completions,
        "/v1/responses": door.responses,
        MESSAGES_PATH: door.messages,
    }
    for path, handler in direct.items():  # the router still tells what other methods get
        app.add_route(path, handler, methods=["POST"])
    app.add_api_route("/v1/models", door.models, methods=["GET", "HEAD"])
    app.add_api_route("/v1/models/{model_id:path}", door.model, methods=["GET", "HEAD"])
    app.add_api_route("/health", door.health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", door.ready, methods=["GET", "HEAD"])
    door.stored_responses.add_to(app)
    door.files.add_to(app)
    door.batches.add_to(app)
    door.observer.add_to(app)
    door.tokens.add_to(app)
    ConsoleFiles().add_to(app)
    Description(door.service).add_to(app)
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(ClientDisconnect, _on_departure)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    front = MessagesFront(Front(app, door.service, direct))
    origins = door.service.config.edge.origins
    return with_cors(front, origins) if origins else front


def _parse_responses(body: bytes) -> tuple[GenerationRequest, Dialect]:
    found = parse_responses(body)
    return found.chat, ResponsesDialect(found.asked, found.items)


async def _on_baton_error(request: Request, exc: Exception) -> Response:
    return error_response(as_baton_error(exc), _echo(request))


async def _on_departure(request: Request, exc: Exception) -> Response:
    # nobody reads it; unhandled it would be an error in the log for whoever breaks off a body
    return error_response(Cancelled("the client left", code="client_gone"), _echo(request))


async def _on_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    words = {404: f"there is no {request.method} {request.url.path[:100]}", 405: "this path takes another method"}
    body = http_body(exc.status_code, words.get(exc.status_code, "") or str(exc.detail))
    headers = {**(exc.headers or {}), **_echo(request)}
    if exc.status_code == 405:  # the router tells the methods of the first route that has the path
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return json_response(body, headers, exc.status_code)


def _methods(request: Request) -> set[str]:
    """What the path of a request may be asked by."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE)
    return set().union(*(getattr(route, "methods", None) or () for route in matching))


async def _on_exception(request: Request, exc: Exception) -> Response:
    return internal_response(_echo(request))


def _echo(request: Request) -> dict[str, str]:
    """A client's own request id goes back to it and nowhere else."""
    given = request.headers.get("x-request-id", "")[:MAX_ECHO_CHARS]
    return {"x-request-id": given} if given else {}


def _client_links(request: Request) -> list[Link]:
    """The client's trace is linked, not adopted: strangers may not choose our trace ids or sampling."""
    # the one header alone: what the library finds wrong in baggage and tracestate it writes into our log
    given = request.headers.get("traceparent", "")
    if not given or len(given) > MAX_ECHO_CHARS:
        return []
    carrier = {"traceparent": given}
    context = trace.get_current_span(_TRACE_PARENT.extract(carrier, context=Context())).get_span_context()
    return [Link(context)] if context.is_valid else []
