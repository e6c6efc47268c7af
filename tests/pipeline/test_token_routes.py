"""`/tokenize`, `/detokenize`, `/version` and `/v1/embeddings`."""

from __future__ import annotations

import tomllib
from typing import Any

import httpx
import pytest

from shared.settings.load import ROOT
from shared.version import VERSION
from tests.pipeline.gateway_support import CONTEXT, HEADERS, MODEL, TOKENIZER, Stack, gateway_stack


async def post(stack: Stack, path: str, body: Any) -> httpx.Response:
    return await stack.client.post(path, json=body, headers=HEADERS)


async def test_text_to_ids_and_back() -> None:
    async with gateway_stack() as stack:
        text = "hi user, ď 龜 🫠"
        asked = await post(stack, "/tokenize", {"model": MODEL, "prompt": text})
        assert asked.status_code == 200
        ids = TOKENIZER.encode_prompt(text)
        assert asked.json() == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
        back = await post(stack, "/detokenize", {"model": MODEL, "tokens": ids})
        assert back.json() == {"prompt": text}
        # as many as a chat is billed for
        messages = [{"role": "user", "content": text}]
        counted = (await post(stack, "/tokenize", {"model": MODEL, "messages": messages})).json()["count"]
        chat = await post(stack, "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 1})
        assert chat.json()["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"model": MODEL, "messages": []}, "messages"),
        ("/detokenize", {"model": MODEL}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [TOKENIZER.vocab_size]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [True]}, "tokens.0"),
        ("/v1/embeddings", {"model": MODEL, "input": "hi"}, "model"),
        ("/v1/embeddings", {"input": "hi"}, "model"),
    ],
)
async def test_bad_input_is_named(path: str, body: Any, param: str) -> None:
    async with gateway_stack() as stack:
        response = await post(stack, path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_no_key_no_answer_and_no_model_no_embedding() -> None:
    async with gateway_stack() as stack:
        for method, path in (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version")):
            assert (await stack.client.request(method, path, json={})).status_code == 401
        unknown = await post(stack, "/v1/embeddings", {"model": "other", "input": "hi"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_version_tells_digests() -> None:
    async with gateway_stack() as stack:
        body = (await stack.client.get("/version", headers=HEADERS)).json()
        assert body["version"] == VERSION
        assert body["models"] == [{"id": MODEL, "tokenizer": TOKENIZER.digest, "weights": [], "kernels": []}]


def test_the_version_is_the_projects() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
