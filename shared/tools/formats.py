"""How models write calls of tools: the markers around them. Pure data, and which of them a model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolSetting = Literal["auto", "none", "hermes", "llama3", "mistral"]
ReasoningSetting = Literal["auto", "none", "think"]

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    Attributes:
        open: stands before a call, or before a list of them.
        close: stands behind it; "" where nothing does.
        bare: an output that begins with a brace is a call too, without `open`.
        listed: calls stand in a JSON list, behind one `open`.
        separator: between calls that share one `open`.
        arguments: the name of the arguments' member.
    """

    name: str
    open: str
    close: str
    bare: bool = False
    listed: bool = False
    separator: str = ""
    arguments: str = "arguments"


HERMES = ToolFormat("hermes", open="<tool_call>", close="</tool_call>")
LLAMA3 = ToolFormat("llama3", open="<|python_tag|>", close="", bare=True, separator=";", arguments="parameters")
MISTRAL = ToolFormat("mistral", open="[TOOL_CALLS]", close="", listed=True, separator=",")
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}


def tool_format(setting: ToolSetting, template: str | None) -> ToolFormat | None:
    """The format of a model; None: it is not asked for any calls.

    `auto` looks for the markers in its chat template. A model whose template knows no tools is told of them as Hermes
    models are, and answers as those do.
    """
    if setting == "none" or template is None:
        return None
    if setting != "auto":
        return FORMATS[setting]
    for form, mark in ((HERMES, "<tool_call>"), (MISTRAL, "[TOOL_CALLS]"), (LLAMA3, '"parameters"')):
        if mark in template and "tools" in template:
            return form
    return HERMES


def reads_tools(template: str) -> bool:
    """True for a chat template that tells the model of tools itself."""
    return "tools" in template


def thinks(setting: ReasoningSetting, template: str | None) -> bool:
    """True for a model that may think aloud, between `<think>` and `</think>`, before it answers."""
    return setting == "think" or (setting == "auto" and template is not None and END_THINK in template)
