"""The messages of a chat request, as strict types: what each role holds, and text only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from shared.ingress.call_arguments import read_arguments
from shared.ingress.tool_schema import MAX_CALLS, ReturnedCall, Strict, encodable

Role = Literal["system", "developer", "user", "assistant", "tool"]

_UNREAD = ("file", "image_url", "input_audio", "refusal", "video_url")
"""Types of parts that others read."""


def text_content(value: Any) -> Any:
    """A content as it came. Raises ValueError for one that is neither text nor a list of text parts, nor missing."""
    if value is None:
        return None
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    for index, part in enumerate(value):
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            name = f" is of type {kind}, but" if kind in _UNREAD else ""
            raise ValueError(f'part {index}{name} must be {{"type": "text", "text": ...}}: this model reads only text')
        if not isinstance(part["text"], str):
            raise ValueError("the text of a part must be a string")
        encodable(part["text"])
    return value


class TextPart(TypedDict):
    """A part of a content, for the API's description."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    type: Literal["text"]
    text: str


_ContentForm = str | Annotated[list[TextPart], Field(min_length=1)] | None
_Content = BeforeValidator(text_content, json_schema_input_type=_ContentForm)


class ChatMessage(Strict):
    """One message. Content: text, or a list of text parts; an assistant's may be missing beside its calls."""

    role: Role
    content: Annotated[str | list[dict[str, str]] | None, _Content] = None
    tool_calls: Annotated[list[ReturnedCall] | None, Field(max_length=MAX_CALLS)] = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(encodable)] | None = None
    reasoning_content: Annotated[str, AfterValidator(encodable)] | None = None

    @property
    def fault(self) -> tuple[str, str] | None:
        """(field, what is wrong with it) where its role and its fields do not go together."""
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if self.role != role and getattr(self, name) is not None:
                return name, f"belongs to messages of role {role}"
        if self.role == "tool" and self.tool_call_id is None:
            return "tool_call_id", "is required: the id of the call that is answered"
        if self.content is None and not self.tool_calls:
            return "content", "is required"
        return None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: a call's arguments are an object, not text."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": read_arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message
