"""What an output with tools may look like, as a grammar of llguidance's Lark. Pure.

    start:  thoughts? (calls | said)

Calls are written as the model's format has them, each with the schema of its tool's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.grammar.source import ANY_OBJECT, literal, schema_body
from shared.tools.formats import END_THINK, THINK, ToolFormat

MAX_PARALLEL = 16
"""Calls of one output, where the grammar counts them."""
_ANY = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as grammars need it.

    Attributes:
        schema: of its arguments, a JSON schema; None for any object.
        field: where the schema stands in the request, for errors.
    """

    name: str
    schema: Mapping[str, Any] | None
    field: str


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Whether thoughts may come first; `inside`: the prompt has opened them."""

    inside: bool = False


def body_grammar(body: str, thoughts: Thoughts | None, special: Mapping[str, int]) -> str:
    """A Lark expression as a whole grammar, thoughts before it; `special` as of `forced_calls`."""
    if thoughts is None:
        return f"start: {body}\n"
    # a lazy lexeme ends with the first mark; a token cannot stand in one, nor in the text before it
    lazy = "" if END_THINK in special else "[lazy]"
    rules = f"thoughts{lazy}: {_ANY} {_marker(END_THINK, special)}\ngap: /[ \\n]{{1,3}}/\n"
    if thoughts.inside:
        return f"start: thoughts gap? {body}\n{rules}"
    return f"start: (open thoughts gap?)? {body}\nopen: {_marker(THINK, special)}\n{rules}"


def forced_calls(
    form: ToolFormat, tools: Sequence[CallableTool], *, parallel: bool, special: Mapping[str, int]
) -> tuple[str, str]:
    """(expression, further rules) of an output that is one call or, in parallel, several.

    Args:
        special: ids of the tokenizer's special tokens by text: markers among them are tokens, not text.
    """
    more = MAX_PARALLEL - 1
    if form.listed:
        rest = f'(", " call){{0,{more}}}' if parallel else ""
        return f'{_marker(form.open, special)} "[" call {rest} "]"', _call_rules(form, tools)
    if form.bare:
        rest = f'("; " call){{0,{more}}}' if parallel else ""
        return f"call {rest}", _call_rules(form, tools)
    tagged = f'{_marker(form.open, special)} "\\n" call "\\n" {_marker(form.close, special)}'
    rest = f'("\\n" tagged){{0,{more}}}' if parallel else ""
    return f"tagged {rest}", f"tagged: {tagged}\n{_call_rules(form, tools)}"


def free_calls(
    form: ToolFormat, tools: Sequence[CallableTool], *, parallel: bool, special: Mapping[str, int], said: str = ""
) -> tuple[str, str]:
    """(expression, further rules) of an output that may call or not, but where it calls, keeps to the schemas.

    Args:
        said: the expression that what is said keeps to; "" for any text.
    """
    calls, rules = forced_calls(form, tools, parallel=parallel and not form.close, special=special)
    if said:
        calls, rules = forced_calls(form, tools, parallel=parallel, special=special)
        return f"(calls | {said})", f"calls: {calls}\n{rules}"
    if form.bare:
        # what begins with a brace is a call
        return "(calls | other)", f"calls: {calls}\nother: /([^{{ \\t\\r\\n](.|\\n)*)?/\n{rules}"
    if form.open in special:
        several = "(TEXT? calls)* TEXT?" if parallel else "TEXT? calls?"
        return several, f"TEXT: {_ANY}\ncalls: {calls}\n{rules}"
    # the lazy lexeme ends with the first marker; what follows it is a call and nothing else
    inside = calls.removeprefix(literal(form.open)) if form.listed else f'"\\n" call "\\n" {literal(form.close)}'
    several = "(before inside)* TEXT" if parallel else "(before inside | TEXT)"
    return several, f"before[lazy]: TEXT {literal(form.open)}\nTEXT: {_ANY}\ninside: {inside}\n{rules}"


def _marker(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else literal(text)


def _call_rules(form: ToolFormat, tools: Sequence[CallableTool]) -> str:
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n"]
    for i, tool in enumerate(tools):
        head = json.dumps({"name": tool.name}, ensure_ascii=False)[:-1] + f', "{form.arguments}": '
        schema = {"type": "object", **(tool.schema or ANY_OBJECT)}
        rules.append(f'call_{i}: {literal(head)} {schema_body(schema, tool.field)} "}}"\n')
    return "".join(rules)
