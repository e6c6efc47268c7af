"""Two tenants never share KV: neither the answer's `cached_tokens` nor the trace shows the other's prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stack.running import MODEL, OTHER_KEY, Baton

pytestmark = pytest.mark.model

PROMPT = "The archive of the lighthouse keepers. " + " ".join(f"Night {i} was calm;" for i in range(60))
SPANS = ("index.match", "decode.run", "policy.settle")


def ask(stack: Baton, key: str = "") -> tuple[int, str, dict[str, dict[str, Any]]]:
    """(cached tokens, text, attributes of the trace's spans by name)"""
    answer = stack.openai(key).completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    spans = stack.trace(answer.id, *SPANS, "gateway.request")
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return cached, answer.choices[0].text, {span["name"]: span["attributes"] for span in spans}


def test_a_prompt_one_tenant_warmed_is_cold_for_another(stack: Baton) -> None:
    # Given a long prompt of tenant demo, warm after its first request
    first, text, _ = ask(stack)
    again, text_again, warm = ask(stack)
    assert first == 0
    assert again >= 256
    assert text_again == text
    assert warm["gateway.request"]["baton.tenant"] == "demo"
    assert warm["gateway.request"]["baton.cached_tokens"] == again
    assert warm["index.match"]["baton.matched_blocks"] > 0
    # When another tenant sends the same bytes
    others, others_text, cold = ask(stack, OTHER_KEY)
    # Then it hits nothing, at the index and at the workers, and gets the same answer
    assert others == 0
    assert others_text == text
    assert cold["gateway.request"]["baton.tenant"] == "other"
    assert cold["gateway.request"]["baton.cached_tokens"] == 0
    assert cold["index.match"]["baton.reason"] == "nothing_held"
    assert not cold["index.match"].get("baton.matched_blocks")
    assert not cold.get("prefill.run", {}).get("baton.cached_tokens")
    # And hits its own afterwards
    assert ask(stack, OTHER_KEY)[0] == again
