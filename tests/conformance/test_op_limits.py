"""OP-31: doors without a key."""

from __future__ import annotations

import pytest

from tests.conformance.support import canary
from tests.pipeline.gateway_support import gateway_stack

WRONG = ("", "Bearer", "Bearer wrong", "Basic a2V5LWE=", "Bearer  ", "key-a", "Bearer key-a key-a", "bearer x")


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
async def test_op31_what_is_not_on_the_public_list_needs_a_key(method: str) -> None:
    paths = (
        *("/v1/models", "/v1/models/tiny", "/v1/chat/completions", "/v1/completions", "/v1/files", "/v1/batches"),
        *("/v1/embeddings", "/v1/responses", "/tokenize", "/metrics", "/docs", "/openapi.json", "/invocations"),
        *("/baton/cluster", "/baton/traces", "/health/", "/healthz", "/readyx", "/consolex"),
        *("//v1/models", "/v1//models", "/v1/models/", "/v1/../v1/models", "/console/../v1/models", "/%2e/v1/models"),
    )
    async with gateway_stack() as stack:
        said = set()
        for number, path in enumerate(paths):
            for wrong in ("", WRONG[number % len(WRONG)]):
                response = await stack.client.request(method, path, headers={"authorization": wrong} if wrong else {})
                # a path that is none of ours may be told as such, and the page's folder holds no secret
                assert response.status_code == 401 or (
                    path.startswith("/console/") and response.status_code in (404, 405)
                )
                if response.status_code == 401:
                    assert response.headers["www-authenticate"] == "Bearer"
                    said.add(response.text)
        assert len(said - {""}) <= 1
        assert not stack.backend.admits
        assert (await stack.client.get("/v1/models", headers={"authorization": "BEARER key-a"})).status_code == 200
        await canary(stack)
