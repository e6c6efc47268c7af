"""Text to token ids and back, and what this server is made of: what evaluation tools and load generators ask for."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from services.gateway.answers import json_response
from services.gateway.auth import key_hash
from services.gateway.body import read_body
from services.gateway.service import GatewayService
from shared.contracts.errors import InvalidInput
from shared.contracts.messages import Identity
from shared.ingress.messages_request import named_here, parse_count
from shared.ingress.openai_schema import GenerationRequest
from shared.ingress.parse import json_object, parse_as, parse_chat, parse_completion
from shared.ingress.served_models import ServedModel
from shared.version import VERSION

MAX_IDS = 1_000_000
EMBEDDINGS = "no model of this server makes embeddings"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DetokenizeBody(_Strict):
    """POST /detokenize."""

    model: str = Field(min_length=1)
    tokens: list[int] = Field(max_length=MAX_IDS)


class EmbeddingsBody(_Strict):
    """POST /v1/embeddings."""

    model: str = Field(min_length=1)
    input: Any = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


class _Asker(NamedTuple):
    identity: Identity
    key_hash: bytes


class TokenRoutes:
    """Handlers of `/tokenize`, `/v1/messages/count_tokens`, `/detokenize`, `/version` and `/v1/embeddings`."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/v1/messages/count_tokens", self.count, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route("/version", self.version, methods=["GET"])
        app.add_api_route("/v1/embeddings", self.embeddings, methods=["POST"])

    async def tokenize(self, request: Request) -> Response:
        """`prompt` (text) or `messages` of a `model`, as a completion or a chat would be tokenized."""
        body, asker = await self._body(request)
        parsed = await self._service.models.parse(parse_tokenize, body)
        model = await self._counted(asker, parsed.model)
        (tokens,) = await model.codec.encode(parsed)
        return json_response({"count": len(tokens), "max_model_len": model.context, "tokens": tokens})

    async def count(self, request: Request) -> Response:
        """Tokens of the prompt that `POST /v1/messages` would make."""
        body, asker = await self._body(request)
        parsed = await self._service.models.parse(parse_count, body)
        model = await self._counted(asker, parsed.model)
        try:
            (tokens,) = await model.codec.encode(parsed)
        except InvalidInput as error:
            raise named_here(error) from None
        return json_response({"input_tokens": len(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`, special ones left out, as it would stand in an answer."""
        body, asker = await self._body(request)
        parsed: DetokenizeBody = parse_as(DetokenizeBody, body)
        model = await self._counted(asker, parsed.model)
        if not all(0 <= token_id < model.vocab_size for token_id in parsed.tokens):
            raise InvalidInput(f"tokens: must be 0 or more, and below {model.vocab_size}", param="tokens")
        return json_response({"prompt": await model.codec.decode(parsed.tokens)})

    async def embeddings(self, request: Request) -> Response:
        """Refused, once key and model are known."""
        body, asker = await self._body(request)
        self._service.models.get(parse_as(EmbeddingsBody, body).model, asker.identity.models)
        raise InvalidInput(f"model: {EMBEDDINGS}", param="model", code="unsupported_model")

    async def version(self, request: Request) -> Response:
        """What answers here: this program, and of each model its tokenizer, weights and kernels."""
        identity = await self._service.authenticate(key_hash(request.headers))
        models = self._service.models.open_to(identity.models)
        body = {"version": VERSION, "python": platform.python_version(), "models": [self._made_of(m) for m in models]}
        return json_response(body)

    def _made_of(self, model: ServedModel) -> dict[str, Any]:
        """Digests of a model; weights and kernels as its workers tell them, several while they are replaced."""
        return {
            "id": model.name,
            "tokenizer": model.codec.tokenizer.digest,
            **self._service.cluster.made_of(model.pool),
        }

    async def _counted(self, asker: _Asker, name: str) -> ServedModel:
        """The model, which the key may use, once the request is counted among those a minute."""
        model = self._service.models.get(name, asker.identity.models)
        await self._service.count(asker.identity, asker.key_hash, model.name)
        return model

    async def _body(self, request: Request) -> tuple[bytes, _Asker]:
        """The body of a request with a key, and whose key that is."""
        hashed = key_hash(request.headers)
        asker = _Asker(await self._service.authenticate(hashed), hashed)
        config = self._service.config
        length = request.headers.get("content-length")
        body = await read_body(request.stream(), length, config.max_body_bytes, config.body_timeout_s)
        return body, asker


def parse_tokenize(body: bytes) -> GenerationRequest:
    """The chat or completion request whose prompt is to be tokenized. Raises InvalidInput naming the field."""
    if "messages" in json_object(body):
        return parse_chat(body)
    request = parse_completion(body)
    if len(request.prompt) != 1 or not isinstance(request.prompt[0], str):
        raise InvalidInput("prompt: must be one text", param="prompt")
    return request
