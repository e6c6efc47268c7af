"""A few good requests of every route that takes JSON, for the fuzzer to break."""

from __future__ import annotations

from typing import Any

from tests.pipeline.gateway_support import MODEL

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto",
            "max_tokens": 60,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
            "max_completion_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
        },
    ],
    "/v1/completions": [
        {"prompt": "hi", "max_tokens": 60, "stream": True, "stop": ["x"], "seed": 1, "timings": None},
        {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "logit_bias": {"5": 1}},
        {"prompt": [5, 6], "max_tokens": 3, "echo": True, "logprobs": None},
        {"prompt": "hi", "max_tokens": 60, "structured_outputs": {"choice": ["a", "b"]}, "temperature": 0.5},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 60},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **TOOL}],
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 60,
            "stream": True,
        },
        {"input": "hi", "max_output_tokens": 20, "store": True, "metadata": {"a": "b"}},
        {"input": "hi", "max_output_tokens": 20, "background": True, "stream": True, "previous_response_id": None},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
            ],
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "stop_sequences": ["x"],
            "max_tokens": 60,
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "hi"}], "system": "s"}],
    "/tokenize": [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/v1/embeddings": [{"input": "hi"}],
    "/v1/batches": [
        {
            "input_file_id": "file-none",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
    ],
    "/v1/batches/batch_none/cancel": [{}],
    "/v1/responses/resp_none/cancel": [{}],
}


def with_model(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A good request of a route."""
    return body if path.startswith("/v1/batches") or path.endswith("/cancel") else {"model": MODEL, **body}
