"""Tools in the prompt of a model whose chat template knows none: all of it in text, as Hermes has it. Pure.

The words are those of Qwen 2.5's template, which many models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def tell_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Messages in which tools are told in the system's, and calls and their results stand in contents."""
    told: list[dict[str, Any]] = []
    for message in messages:
        plain = _as_text(message)
        if message["role"] == "tool" and told and told[-1].pop("answers", False):
            plain["content"] = f"{told.pop()['content']}\n{plain['content']}"
        told.append(plain)
    for message in told:
        message.pop("answers", None)
    if not tools:
        return told
    words = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told and told[0]["role"] in ("system", "developer"):
        first = dict(told[0])
        first["content"] = f"{text_of(first['content'])}\n\n{words}".lstrip("\n")
        return [first, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def text_of(content: Any) -> str:
    """A message's content as text: its parts joined."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
        return {"role": "user", "content": content, "answers": True}
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if calls := message.get("tool_calls"):
        said = [text_of(message["content"])] if message["content"] else []
        plain["content"] = "\n".join([*said, *(f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls)])
    return plain


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
