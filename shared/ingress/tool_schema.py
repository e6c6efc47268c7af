"""Tools, the choice of them and calls as requests of the OpenAI API hold them, as strict types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

MAX_TOOLS = 128
MAX_CALLS = 128


def encodable(text: str) -> str:
    """The text. Raises ValueError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is not valid Unicode") from None
    return text


class Strict(BaseModel):
    """Types as they are, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _schema(value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be a JSON schema, an object")
    if value is not None and value.get("type", "object") != "object":
        raise ValueError("must describe an object: its type must be object")
    return value


def word_or_object(value: Any) -> str:
    """The tag of the form that a choice has, which is a word unless it is an object."""
    return "object" if isinstance(value, dict | BaseModel) else "word"


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(encodable)]
Arguments = Annotated[str, AfterValidator(encodable)]
ToolSchema = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]


class Function(Strict):
    """What a tool does, and what it takes."""

    name: FunctionName
    description: Annotated[str, AfterValidator(encodable)] | None = None
    parameters: ToolSchema = None
    strict: bool | None = None


class Tool(Strict):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    """Its name."""

    name: FunctionName


class ChosenTool(Strict):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


ChoiceWord = Annotated[Literal["none", "auto", "required"], Tag("word")]
ToolChoice = Annotated[ChoiceWord | Annotated[ChosenTool, Tag("object")], Discriminator(word_or_object)]


def _without(*names: str) -> Any:
    """A validator that drops what client libraries add to a message that they hand back."""

    def drop(value: Any) -> Any:
        return {k: v for k, v in value.items() if k not in names} if isinstance(value, dict) else value

    return BeforeValidator(drop)


class CalledFunction(Strict):
    """A call as it was made."""

    name: FunctionName
    arguments: Arguments


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: Annotated[CalledFunction, _without("parsed_arguments")]


ReturnedCall = Annotated[ToolCall, _without("index")]


def check_tools(tools: tuple[Tool, ...] | list[Tool] | None) -> Any:
    """Raises ValueError for too many, or two of one name."""
    names = [tool.function.name for tool in tools or ()]
    if len(names) > MAX_TOOLS:
        raise ValueError(f"must hold at most {MAX_TOOLS} tools")
    if len(set(names)) < len(names):
        raise ValueError("two tools have the same name")
    return tools
