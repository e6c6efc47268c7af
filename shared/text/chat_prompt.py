"""The token ids of a conversation, in which no message can inject a special token.

The rule: a special token counts only if its first and its last character come from the template. Before rendering,
those characters are replaced in everything a client wrote by private marks, one for one; marks break the texts of
special tokens, survive the template, and are turned back before the text is encoded. The stretches between special
tokens are encoded whole, template and message text together, so merges across their border are those of the whole text,
and a conversation without special-token text gets exactly the ids of its rendered text.

Templates look for strings such as `</think>` in messages. So a string that the template names is left unmarked, unless
a special token could begin or end inside it. Should a template still treat a mark otherwise than the character (it
escapes, or compares single characters), the plain text is used when both texts hold the same special tokens in the same
order, else the marked one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from shared.contracts.errors import SettingsError
from shared.text.alternatives import longest_of
from shared.text.chat_template import MAX_RENDERED_CHARS, Message, plain_data, plain_messages, render, string_constants
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

    data = (plain_messages(messages), None if tools is None else plain_data(list(tools)))
    plain = rendered(*data)
    marking = _marking(tuple(tokenizer.special_tokens), source)
    if not any(edge in text for text in _strings(data) for edge in marking.edges):
        return tokenizer.encode_marked(plain, {})

    marks = dict(zip(_free_marks([plain, *_strings(data)], marking.template_chars), marking.edges, strict=False))
    marked = rendered(*_mark_data(data, marking.marker(marks)))
    if marked.translate(marks) != plain and tokenizer.parsed_specials(marked) == tokenizer.parsed_specials(plain):
        return tokenizer.encode_marked(plain, {})
    return tokenizer.encode_marked(marked, marks)


def prepare(tokenizer: Tokenizer) -> None:
    """Work out now what no message changes: tens of milliseconds, which the first conversation would wait for.

    Raises SettingsError for a chat template that does not compile.
    """
    if tokenizer.chat_template is not None:
        _marking(tuple(tokenizer.special_tokens), tokenizer.chat_template)


@dataclass(frozen=True, slots=True)
class _Marking:
    """What special tokens and a template tell of the marks, whatever the messages say.

    Attributes:
        edges: first and last characters of special tokens, sorted.
        kept: strings that stay unmarked.
        pattern: finds special tokens, `kept` and `edges` in a text.
        template_chars: characters beyond ASCII in the template, which can be no marks.
    """

    edges: tuple[str, ...]
    kept: frozenset[str]
    pattern: re.Pattern[str]
    template_chars: frozenset[str]

    def marker(self, marks: Mapping[int, str]) -> Callable[[str], str]:
        """A function that puts marks into a text.

        Args:
            marks: code point of each mark → the first or last character of a special token, for which it stands.
        """
        to_mark = {ord(char): chr(mark) for mark, char in marks.items()}

        def replaced(match: re.Match[str]) -> str:
            return match.group() if match.group() in self.kept else match.group().translate(to_mark)

        return lambda text: self.pattern.sub(replaced, text)


@lru_cache(maxsize=32)
def _marking(specials: tuple[str, ...], template: str) -> _Marking:
    """Once a model, not once a request: some have a thousand special tokens. Raises as `string_constants`."""
    edges = tuple(sorted({char for special in specials for char in special[:1] + special[-1:]}))
    touches = _toucher(specials)
    kept = frozenset(text for text in string_constants(template) if text and not touches(text))

    pattern = re.compile(longest_of([*specials, *kept, *edges]))
    return _Marking(edges, kept, pattern, _beyond_ascii([template]))


def _toucher(specials: Sequence[str]) -> Callable[[str], bool]:
    """A function that is true for a text inside which a special token could begin or end, or that is in one."""
    begins = {special[:k] for special in specials for k in range(1, len(special))}
    ends = {special[-k:] for special in specials for k in range(1, len(special))}

    def touches(text: str) -> bool:
        return any(text in special or special in text for special in specials) or any(
            text[-k:] in begins or text[:k] in ends for k in range(1, len(text) + 1)
        )

    return touches


def _free_marks(texts: Iterable[str], taken: frozenset[str]) -> Iterator[int]:
    used = taken | _beyond_ascii(texts)
    return (code for code in range(_LAST_PRIVATE, 0xFFFF, -1) if chr(code) not in used)


def _beyond_ascii(texts: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*(text for text in texts if not text.isascii()))


def _strings(value: Any) -> Iterator[str]:
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
