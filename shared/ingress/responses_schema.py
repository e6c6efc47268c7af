"""The requests of OpenAI's Responses API that Baton reads, as strict types; the rule is that of `openai_schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from shared.ingress.metadata import Metadata
from shared.ingress.openai_schema import CacheSalt, Identifier
from shared.ingress.structure_schema import JsonObjectFormat, NamedSchema, TextFormat
from shared.ingress.tool_schema import (
    MAX_TOOLS,
    Arguments,
    CallId,
    ChoiceWord,
    FunctionName,
    Strict,
    ToolSchema,
    encodable,
    word_or_object,
)

MAX_ID_CHARS = 100

RESPONSES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "context_management": (None, []),
    "conversation": (None,),
    "include": (None, []),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
"""Known parameters without support, with the values that ask for nothing."""

REASONING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"effort": (None,), "generate_summary": (None,), "summary": (None,)}
TEXT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"verbosity": (None,)}
TOOL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (None, ["direct"]),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}

ITEM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "async": (None, False),
    "caller": (None, {"type": "direct"}),
    "created_by": (None,),
    "encrypted_content": (None,),
    "namespace": (None,),
    "parsed_arguments": (None,),
    "phase": (None,),
}
"""The same for an item of `input`; items of an answer may be sent back as the client library got them."""

Text = Annotated[str, AfterValidator(encodable)]


PartType = Literal["input_text", "output_text", "reasoning_text"]


class TextPart(Strict):
    """Text in a message or in a function's output."""

    type: PartType
    text: Text


class _Item(Strict):
    id: CallId | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[TextPart]


class FunctionCallItem(_Item):
    """A call the model made."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: Arguments


class FunctionOutputItem(_Item):
    """What a called function answered."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text | list[TextPart]


class ReasoningItem(_Item):
    """What the model thought before."""

    type: Literal["reasoning"]
    summary: Annotated[list[TextPart], Field(max_length=0)]
    content: list[TextPart] | None = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
ITEMS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(Strict):
    """A function the model may call. It is enforced in calls the model makes by itself only where `strict` is true."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: ToolSchema = None
    strict: bool | None = None


class ChosenFunction(Strict):
    """The one function that is to be called."""

    type: Literal["function"]
    name: FunctionName


FunctionChoice = Annotated[ChoiceWord | Annotated[ChosenFunction, Tag("object")], Discriminator(word_or_object)]


class SchemaFormat(NamedSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


TextForm = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class TextOptions(Strict):
    """What the text must be."""

    format: TextForm | None = None


class StreamOptions(Strict):
    """Nothing is obfuscated."""

    include_obfuscation: Literal[False] | None = None


def _no_more_tools(tools: Any) -> Any:
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:  # before each is looked at
        raise ValueError(f"must hold at most {MAX_TOOLS} tools")
    return tools


class ReasoningOptions(Strict):
    """None of them does anything here."""


class ResponsesRequest(Strict):
    """POST /v1/responses, but for `input`."""

    model: str = Field(min_length=1)
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[FunctionTool] | None, BeforeValidator(_no_more_tools)] = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    metadata: Metadata = None
    user: str | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    cache_salt: CacheSalt | None = None
