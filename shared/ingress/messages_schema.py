"""The requests of Anthropic's Messages API that Baton reads, as strict types; the rule is that of `openai_schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shared.ingress.openai_schema import MAX_STOP_CHARS, MAX_STOPS
from shared.ingress.tool_schema import CallId, FunctionName, Strict, encodable

CACHED: tuple[Any, ...] = (None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "5m"})
"""Every prompt is cached, so this asks for what is done anyway; five minutes are meant where none are told."""

MESSAGES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "cache_control": CACHED,
    "compaction": (None,),
    "container": (None,),
    "context_management": (None,),
    "diagnostics": (None,),
    "fallback_credit_token": (None,),
    "fallbacks": (None, []),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "output_config": (None, {}),
    "output_format": (None,),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "thinking": (None, {"type": "disabled"}),
    "user_profile_id": (None,),
    "workspace_id": (None,),
}
"""Known parameters without support, with the values that ask for nothing."""

TOOL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (None, ["direct"]),
    "cache_control": CACHED,
    "defer_loading": (None, False),
    "eager_input_streaming": (None, True, False),
    "input_examples": (None, []),
}
BLOCK_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "cache_control": CACHED,
    "caller": (None, {"type": "direct"}),
    "citations": (None, []),
    "parsed_output": (None,),
    "toolset_name": (None,),
}

Text = Annotated[str, AfterValidator(encodable)]


class TextBlock(Strict):
    """What is said."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Strict):
    """What the model thought; nothing here is signed."""

    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


class ToolUseBlock(Strict):
    """A call the model made."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(Strict):
    """What the tool answered, but for its content."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    is_error: bool | None = None


class Tool(Strict):
    """A tool the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Strict):
    """Whether tools are called; `name` with type tool only."""

    type: Literal["auto", "any", "none", "tool"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Strict):
    """Describes."""

    user_id: str | None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens, but for `messages` and `system`."""

    model: str = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(encodable)]


class MessagesRequest(CountRequest):
    """POST /v1/messages, but for `messages` and `system`."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stop_sequences: Annotated[list[StopText] | None, Field(max_length=MAX_STOPS)] = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    stream: bool | None = None
    metadata: Metadata | None = None
