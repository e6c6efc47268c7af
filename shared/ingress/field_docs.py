"""`python -m shared.ingress.field_docs` writes the table of fields in `docs/api.md` anew; a test holds it to the code.

What a field means is written here; whether it is taken is read from the schemas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shared.ingress.metadata import MAX_NAME_CHARS, MAX_PAIRS, MAX_VALUE_CHARS
from shared.ingress.openai_schema import (
    CHAT_NEUTRAL,
    COMPLETIONS_NEUTRAL,
    EXTENSIONS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_IDENTIFIER_CHARS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"
DESCRIBES = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
"""Fields that say something about a request and ask for nothing."""

MEANING: Mapping[str, str] = {
    "audio": "this server makes text",
    "best_of": "only the value of `n`",
    "cache_salt": f"at most {MAX_SALT_CHARS} characters: KV is shared only with your requests of the same salt; none "
    "is a salt of its own, the empty text another",
    "echo": "the answer begins with the prompt; with `logprobs`, its tokens are scored too",
    "frequency_penalty": "-2 to 2, for each time a token was put out",
    "function_call": "`tool_choice` does it",
    "functions": "`tools` does it",
    "ignore_eos": "the model's end-of-sequence token ends nothing",
    "include_stop_str_in_output": "the stop string, or the token of `stop_token_ids`, stays in the text",
    "logit_bias": f"token id to -100 … 100, at most {MAX_BIASES}; added to logits after penalties",
    "logprobs": f"chat: true or false; completions: 0 to {MAX_LOGPROBS} most likely tokens beside each",
    "max_completion_tokens": "1 or more; must fit the context with the prompt",
    "max_tokens": "the same; without either, the rest of the context or your default",
    "messages": "roles system, developer, user, assistant, tool; content as text or text parts",
    "metadata": f"at most {MAX_PAIRS} pairs of strings of {MAX_NAME_CHARS} and {MAX_VALUE_CHARS} characters; not kept",
    "min_p": "0 to 1: share of the best token's probability below which a token is dropped",
    "min_tokens": "so many tokens come before an end-of-sequence token, a stop id or a stop string counts",
    "modalities": "this server makes text",
    "model": "a name or alias of `/v1/models`",
    "moderation": "no such service",
    "n": f"choices of each prompt; at most {MAX_CHOICES}, and what a worker runs at once; the prompt is billed once",
    "parallel_tool_calls": "more than one call in a turn",
    "prediction": "type `content`: what the output may be; the text is the same, and there sooner where that is right "
    "and the server speculates",
    "presence_penalty": "-2 to 2, once for a token that was put out",
    "prompt": "text, token ids, or a list of either: each prompt has its own choices, counted on",
    "prompt_cache_key": f"at most {MAX_IDENTIFIER_CHARS} characters; a hint that nothing needs: what is cached is "
    "found by content, all over the tenant",
    "prompt_cache_options": "cache scopes come from the tenant and `cache_salt`",
    "prompt_cache_retention": "retention comes from the tenant's record",
    "reasoning_effort": "models here have no levels of it",
    "repetition_penalty": "0.000000001 to 10: logits of tokens in prompt or output divided or multiplied by it",
    "response_format": "text, json_object, json_schema",
    "safety_identifier": f"at most {MAX_IDENTIFIER_CHARS} characters; not kept",
    "seed": "64 bits, signed or not: the same seed gives the same text",
    "service_tier": "`priority` asks for class interactive, `flex` for analysis, never above the tenant's own; "
    "`auto` and `default` take that one. The answer tells which served",
    "stop": f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters; not in the text",
    "stop_token_ids": f"at most {MAX_STOP_IDS}; end a choice with `stop`, and show no text",
    "store": "nothing is stored",
    "stream": "server-sent events",
    "stream_options": "`include_usage`, and with it `continuous_usage_stats`: usage in every chunk; with `stream` only",
    "structured_outputs": "`regex`, `choice`, `grammar` or `json`: what the text must be",
    "suffix": "models here fill no gaps",
    "temperature": "0 (greedy) to 2; the model's own default when left out",
    "timings": "the answer tells `total_ms`, `queue_ms`, `first_token_ms`, `tokens_per_second` in `timings`; "
    "of a stream beside its usage",
    "tool_choice": "none, auto, required, or one function",
    "tools": "functions",
    "top_k": "0 (off) or more",
    "top_logprobs": f"0 to {MAX_LOGPROBS}; with `logprobs` only",
    "top_p": "above 0, at most 1",
    "user": "any text; not kept",
    "verbosity": "models here have no levels of it",
    "web_search_options": "no such service",
}
"""Every field of both requests, and what it takes or why it is refused."""

ENDPOINTS: tuple[tuple[type[BaseModel], Mapping[str, tuple[Any, ...]]], ...] = (
    (ChatRequest, CHAT_NEUTRAL),
    (CompletionRequest, COMPLETIONS_NEUTRAL),
)


def table() -> str:
    """Markdown: a row for each field."""
    rows = ["| field | chat | completions | |", "|---|---|---|---|"]
    for name, meaning in sorted(MEANING.items()):
        marked = f"`{name}`" + (" *" if name in EXTENSIONS else "")
        cells = [status(name, model, neutral) for model, neutral in ENDPOINTS]
        rows.append(f"| {marked} | {cells[0]} | {cells[1]} | {meaning} |")
    return "\n".join(rows)


def status(name: str, model: type[BaseModel], neutral: Mapping[str, tuple[Any, ...]]) -> str:
    """What a request does with a field: works, describes, refused (but for some values), unknown."""
    if name in model.model_fields:
        return "describes" if name in DESCRIBES else "works"
    if name in neutral:
        harmless = [f"`{json.dumps(value)}`" for value in neutral[name] if value is not None]
        return "refused" + (f", but for {', '.join(harmless)}" if harmless else "")
    return "unknown"


def with_table(page: str) -> str:
    """The page with the table in its place. Raises ValueError when the page has none."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: {BEGIN} and {END} must stand around the table")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(0)
