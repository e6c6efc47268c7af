"""`docs/api.md` says of every field of OpenAI's requests what the code does with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.contracts.errors import InvalidInput
from shared.ingress.field_docs import ENDPOINTS, MEANING, PAGE, with_table
from shared.ingress.openai_schema import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL, EXTENSIONS
from shared.ingress.parse import parse_chat, parse_completion
from tests.openai_oracle import document

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
BODIES = {"CreateChatCompletionRequest": CHAT, "CreateCompletionRequest": COMPLETION}


def properties(schema: dict[str, Any]) -> set[str]:
    schemas = document()["components"]["schemas"]
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return set(schema.get("properties", ())).union(*(properties(part) for part in schema.get("allOf", ())))


def openai_fields(name: str) -> set[str]:
    return properties(document()["components"]["schemas"][name])


def test_the_page_is_what_the_code_says() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python -m shared.ingress.field_docs"


def test_every_field_has_a_row() -> None:
    known = set(MEANING)
    assert set().union(*(openai_fields(name) for name in BODIES)) <= known
    fields = set().union(*(set(model.model_fields) | set(neutral) for model, neutral in ENDPOINTS))
    assert fields == known
    openai = openai_fields("CreateChatCompletionRequest")
    # what OpenAI's newer document has is no extension of ours
    assert fields - openai - openai_fields("CreateCompletionRequest") - EXTENSIONS == {
        "moderation",
        "prompt_cache_options",
    }


@pytest.mark.parametrize("name", list(BODIES))
def test_no_field_of_openai_is_unknown(name: str) -> None:
    """It works, or is refused as one that is known and has no support."""
    parse = parse_chat if name == "CreateChatCompletionRequest" else parse_completion
    model, neutral = ENDPOINTS[list(BODIES).index(name)]
    for field in sorted(openai_fields(name)):
        assert (field in model.model_fields) != (field in neutral), field
        body = BODIES[name] | {field: [{"no": "field takes this"}]}
        with pytest.raises(InvalidInput) as caught:
            parse(json.dumps(body).encode())
        assert caught.value.param.split(".")[0] == field
        assert (caught.value.param, caught.value.code) != (field, "unknown_parameter")


def test_values_that_ask_for_nothing_pass() -> None:
    for neutral, body, parse in (
        (CHAT_NEUTRAL, CHAT, parse_chat),
        (COMPLETIONS_NEUTRAL, COMPLETION, parse_completion),
    ):
        for field, values in neutral.items():
            for value in values:
                parse(json.dumps(body | {field: value}).encode())
