"""What a client says its output may turn out to be: a guess, which a worker that speculates verifies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shared.ingress.chat_message import TextPart, text_content
from shared.ingress.tool_schema import Strict


def _content(value: Any) -> Any:
    if value is None:
        raise ValueError("must be a string or a list of text parts")
    return text_content(value)


_ContentForm = str | Annotated[list[TextPart], Field(min_length=1)]


class Prediction(Strict):
    """`prediction` of a chat."""

    type: Literal["content"]
    content: Annotated[str | list[dict[str, str]], BeforeValidator(_content, json_schema_input_type=_ContentForm)]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)
