"""From a checked request to its output's form and grammar. Pure; whether a grammar compiles is asked elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.contracts.errors import InvalidInput
from shared.grammar import source
from shared.ingress.openai_schema import ChatRequest, GenerationRequest
from shared.ingress.output_form import PLAIN, OutputForm
from shared.ingress.structure_schema import JsonSchemaFormat
from shared.ingress.tool_schema import ChosenTool, Tool
from shared.tools.formats import THINK, ToolFormat
from shared.tools.grammar import CallableTool, Thoughts, body_grammar, forced_calls, free_calls

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SAYS_NO_MORE = frozenset({"$schema", "description", "properties", "required", "title", "type"})
"""Keys of a schema that leave open what else an object may hold."""
MAX_TOTAL = 512 * 1024
"""Most bytes of the grammars of a request's choices together: they cross the bus in one message."""


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What is known of how a model writes.

    Attributes:
        tools: how it calls them; None: it is not asked to.
        thinks: whether it may think first.
        special: ids of its special tokens by text.
    """

    tools: ToolFormat | None = None
    thinks: bool = False
    special: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Structure:
    """`grammar`: "" for none; `field` names what asked for it, and `schemas` those in it by their own fields."""

    form: OutputForm = PLAIN
    grammar: str = ""
    field: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def structure_of(request: GenerationRequest, model: ModelForm, prompt_end: str) -> Structure:
    """The form and the grammar of a request's outputs.

    Args:
        prompt_end: the end of the prompt's text, special tokens included.

    Raises:
        InvalidInput: they contradict each other, or the model writes no calls.
    """
    if not isinstance(request, ChatRequest):
        if request.structured_outputs is None:
            return Structure()
        asked = _asked(request)
        return _checked(request, Structure(PLAIN, _said_grammar(asked, None, model.special), asked.field))
    thoughts = Thoughts(prompt_end.rstrip().endswith(THINK)) if model.thinks else None
    tools = active_tools(request)
    most = 1 if tools and request.parallel_tool_calls is False else 0
    form = OutputForm(model.tools if tools else None, tuple(tool.function.name for tool in tools), most, thoughts)
    if tools and model.tools is None:
        raise InvalidInput("tools: this model calls none", param="tools")
    return _checked(request, _structure(request, model, form, tools))


def active_tools(request: ChatRequest) -> list[Tool]:
    """The tools that may be called."""
    tools = list(request.tools or ())
    choice = request.tool_choice
    if not tools and (choice == "required" or isinstance(choice, ChosenTool)):
        raise InvalidInput("tool_choice: needs tools", param="tool_choice")
    if isinstance(choice, ChosenTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise InvalidInput("tool_choice: names none of the tools", param="tool_choice")
    return [] if choice == "none" else tools


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of what is said: an expression of Lark, or a whole grammar; and the field that asks."""

    field: str = ""
    body: str = ""
    whole: str = ""


def _structure(request: ChatRequest, model: ModelForm, form: OutputForm, tools: Sequence[Tool]) -> Structure:
    asked, thoughts = _asked(request), form.thoughts
    if not tools or model.tools is None:
        return Structure(form, _said_grammar(asked, thoughts, model.special), asked.field)
    if asked.whole:
        raise InvalidInput(f"{asked.field}: a grammar cannot stand beside tools", param=asked.field)
    body = asked.body
    forced = request.tool_choice == "required" or isinstance(request.tool_choice, ChosenTool)
    parallel = request.parallel_tool_calls is not False
    strict = any(tool.function.strict for tool in tools)
    if not (forced or strict or body or not parallel):
        return Structure(form)
    callable_tools = [
        CallableTool(
            tool.function.name,
            _arguments_of(tool) if forced or tool.function.strict else None,
            f"tools.{_index(request, tool)}.function.parameters",
        )
        for tool in tools
    ]
    # a named tool is called once
    parallel = parallel and not isinstance(request.tool_choice, ChosenTool)
    if forced:
        calls, rules = forced_calls(model.tools, callable_tools, parallel=parallel, special=model.special)
    else:
        said = "said" if body else ""
        calls, rules = free_calls(model.tools, callable_tools, parallel=parallel, special=model.special, said=said)
        rules += f"said: {body}\n" if body else ""
    schemas = {tool.field: tool.schema for tool in callable_tools if tool.schema is not None}
    return Structure(
        form, source.lark_grammar(body_grammar(calls, thoughts, model.special) + rules, "tools"), "tools", schemas
    )


def _arguments_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments; a tool that names none and does not ask for others has none, as at OpenAI."""
    schema = tool.function.parameters
    if schema is None:
        return _NO_ARGUMENTS
    if schema.get("properties", {}) == {} and schema.keys() <= _SAYS_NO_MORE and not schema.get("required"):
        return {**schema, "additionalProperties": False}
    return schema


def _said_grammar(asked: _Asked, thoughts: Thoughts | None, special: Mapping[str, int]) -> str:
    """The grammar of an output without calls; "" for none."""
    if asked.whole:
        if thoughts is not None:
            raise InvalidInput(f"{asked.field}: this model thinks first, which the grammar forbids", param=asked.field)
        return source.own_grammar(asked.whole, asked.field)
    return source.lark_grammar(body_grammar(asked.body, thoughts, special), asked.field) if asked.body else ""


def _asked(request: GenerationRequest) -> _Asked:
    given, form = request.structured_outputs, request.response_format if isinstance(request, ChatRequest) else None
    if form is not None and form.type != "text":
        if given is not None:
            raise InvalidInput("structured_outputs: cannot stand beside response_format", param="structured_outputs")
        schema, where = source.ANY_OBJECT, "response_format"
        if isinstance(form, JsonSchemaFormat):
            schema, where = form.json_schema.json_schema, "response_format.json_schema.schema"
        return _Asked(where, source.schema_body(schema, where))
    if given is None:
        return _Asked()
    where = "structured_outputs"
    if given.schema_ is not None:
        return _Asked(f"{where}.json", source.schema_body(given.schema_, f"{where}.json"))
    if given.regex is not None:
        return _Asked(f"{where}.regex", source.regex(given.regex, f"{where}.regex"))
    if given.choice is not None:
        return _Asked(f"{where}.choice", source.choice_body(given.choice, f"{where}.choice"))
    return _Asked(f"{where}.grammar", whole=given.grammar or "")


def _index(request: ChatRequest, tool: Tool) -> int:
    return next(i for i, other in enumerate(request.tools or ()) if other is tool)


def _checked(request: GenerationRequest, structure: Structure) -> Structure:
    """The structure, if nothing else in the request is against its grammar."""
    if not structure.grammar:
        return structure
    if request.ignore_eos:
        raise InvalidInput(f"ignore_eos: cannot stand beside {structure.field}", param="ignore_eos")
    if request.min_tokens:
        raise InvalidInput(f"min_tokens: cannot stand beside {structure.field}", param="min_tokens")
    if len(structure.grammar.encode()) * request.choices > MAX_TOTAL:
        raise InvalidInput(f"n: too many choices for a grammar of this size in {structure.field}", param="n")
    return structure
