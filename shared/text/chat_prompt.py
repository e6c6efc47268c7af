"""The token ids of a conversation, in which no message can inject a special token.

The rule: a special token counts only if its first and its last character come from the template. Before rendering,
those characters are replaced in everything a client wrote by private marks; marks break the texts of special tokens,
survive the template, and are turned back before the text is encoded. The stretches between special tokens are encoded
whole, template and message text together, so merges across their border are those of the whole text, and a conversation
without special-token text gets exactly the ids of its rendered text.

A template may look at marked characters, for instance to find `</think>`; then the marked text differs from the plain
one and a second, lighter marking is used: only where a message holds the text of a special token, ends with the
beginning of one, or begins with the end of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from shared.contracts.errors import InvalidInput, SettingsError
from shared.text.chat_template import MAX_RENDERED_CHARS, Message, plain_messages, render
from shared.text.tokenizer import Tokenizer

_LAST_PRIVATE = 0x10FFFD
"""Marks are taken downwards from the end of the last private-use plane."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    now: datetime,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    max_chars: int = MAX_RENDERED_CHARS,
) -> list[int]:
    """The prompt of a conversation as token ids.

    Args:
        tokenizer: gives the special tokens and, unless `template` is given, the chat template.
        now: local time, for templates that print the date.

    The others are those of `chat_template.render`.

    Raises:
        InvalidInput: the template cannot render the messages (param `messages`).
        SettingsError: there is no chat template, or it does not compile.
    """
    source = tokenizer.chat_template if template is None else template
    if source is None:
        raise SettingsError("this model has no chat template", param="chat_template")

    def rendered(messages: Any, tools: Any) -> str:
        return render(
            source,
            messages,
            add_generation_prompt,
            tools=tools,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            now=now,
            max_chars=max_chars,
        )

    data = (plain_messages(messages), None if tools is None else list(tools))
    text, marks = render_marked(rendered, data, list(tokenizer.special_tokens), source)
    return tokenizer.encode_marked(text, marks)


def render_marked(
    rendered: Callable[[Any, Any], str], data: tuple[Any, Any], specials: Sequence[str], template: str
) -> tuple[str, dict[int, str]]:
    """The rendered text with marks where a client's text could take part in a special token.

    Args:
        rendered: renders (messages, tools).
        data: messages and tools, plain data.
        specials: texts of the special tokens.
        template: the source, in which no mark may occur.

    Returns:
        The text, and for each mark's code point the character it stands for.
    """
    plain = rendered(*data)
    edges = sorted({special[0] for special in specials} | {special[-1] for special in specials})
    if not any(edge in text for text in _strings(data) for edge in edges):
        return plain, {}
    marks = dict(zip(_free_marks(plain + template, data), edges, strict=False))
    to_mark = {ord(char): chr(mark) for mark, char in marks.items()}
    try:
        marked = rendered(*_mark_data(data, lambda text: text.translate(to_mark)))
    except InvalidInput:
        marked = ""
    if marked.translate(marks) != plain:
        marked = rendered(*_mark_data(data, lambda text: _mark_tokens(text, specials, to_mark)))
    return marked, marks


def _mark_tokens(text: str, specials: Sequence[str], to_mark: Mapping[int, str]) -> str:
    def mark(start: int, end: int) -> None:
        nonlocal text
        text = text[:start] + text[start:end].translate(to_mark) + text[end:]

    for special in specials:
        text = text.replace(special, special.translate(to_mark))
    for special in specials:
        for k in range(len(special) - 1, 0, -1):
            if text.endswith(special[:k]):
                mark(len(text) - k, len(text))
            if text.startswith(special[-k:]):
                mark(0, k)
    return text


def _free_marks(text: str, data: Any) -> Iterable[int]:
    used = set(text).union(*map(set, _strings(data)))
    return (code for code in range(_LAST_PRIVATE, 0xFFFF, -1) if chr(code) not in used)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mark_data(data: tuple[Any, Any], mark: Callable[[str], str]) -> tuple[Any, Any]:
    messages, tools = data
    marked = []
    for message in messages:
        # the role is one of a fixed set, so not the client's text
        fields = {"role": message["role"]}
        if "content" in message:
            fields["content"] = _map_strings(message["content"], mark)
        others = {key: item for key, item in message.items() if key not in fields}
        marked.append(fields | _map_strings(others, mark))
    return marked, _map_strings(tools, mark)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
