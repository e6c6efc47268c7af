"""A chat template, rendered as Hugging Face does it: the same sandbox, filters and block rules.

Pure: the time is passed in. Templates come with the model, so from the operator; messages come from strangers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.contracts.errors import ContextExceeded, InvalidInput, SettingsError

ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})
"""The roles accepted. Fixed, because templates write the role next to special tokens, or build them from it."""
MAX_RENDERED_CHARS = 8_000_000
_MAX_DEPTH = 32
_MAX_REASON_CHARS = 200

Message = Mapping[str, Any]


@lru_cache(maxsize=32)
def string_constants(template: str) -> frozenset[str]:
    """The strings that a template's expressions name, and so may look for in a message.

    Raises:
        SettingsError: the template's syntax is wrong (param `chat_template`).
    """
    _compile(template)
    constants = _environment().parse(template).find_all(jinja2.nodes.Const)
    return frozenset(constant.value for constant in constants if isinstance(constant.value, str))


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as fresh plain data with every content a string: text parts are joined in order.

    Raises:
        InvalidInput: no messages, an unknown role, a content part that is not text, or data that is not JSON.
    """
    if not messages:
        raise _invalid("messages must hold at least one message")
    return [_plain_message(message) for message in messages]


def plain_data(value: Any, depth: int = 0) -> Any:
    """A copy of JSON-like data in Python's own types, so that the template meets no methods of ours.

    Raises:
        InvalidInput: not JSON-like, too deep, or text that is not valid Unicode.
    """
    if depth > _MAX_DEPTH:
        raise _invalid(f"messages are nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return _valid_text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_valid_text(str(key)): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_data(item, depth + 1) for item in value]
    raise _invalid("messages must be plain JSON data")


def render(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    now: datetime | None = None,
    max_chars: int = MAX_RENDERED_CHARS,
) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        messages: role, content (a string, or text parts) and whatever else the template reads.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: function schemas, for templates that know tools.
        bos_token, eos_token: what the template may write for them.
        now: local time for a template that prints the date; without it such a template fails.
        max_chars: most code points of output.

    Raises:
        InvalidInput: the template refuses or cannot render the messages (param `messages`).
        ContextExceeded: the result is longer than `max_chars`.
        SettingsError: the template itself does not compile.
    """
    compiled = _compile(template)
    variables = {
        "messages": plain_messages(messages),
        "tools": None if tools is None else plain_data(list(tools)),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "strftime_now": _clock(now),
    }
    try:
        return "".join(_bounded(compiled.generate(variables), max_chars))
    except InvalidInput:
        raise
    except jinja2.TemplateError as exc:
        reason = " ".join((exc.message or type(exc).__name__).split())[:_MAX_REASON_CHARS]
        raise _invalid(f"the chat template refuses these messages: {reason}") from exc
    except Exception as exc:
        # a template can raise anything Python's operators raise; their words may quote the messages
        raise _invalid(f"the chat template cannot render these messages ({type(exc).__name__})") from exc


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's tokens for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (an instance variable in Jinja)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateError as exc:
        raise SettingsError(f"the chat template does not compile: {exc.message}", param="chat_template") from exc


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and non-ASCII
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _clock(now: datetime | None) -> Any:
    def strftime_now(form: str) -> str:
        if now is None:
            raise jinja2.TemplateError("it prints the date, which was not given")
        return now.strftime(form)

    return strftime_now


def _bounded(pieces: Iterator[str], max_chars: int) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > max_chars:
            raise ContextExceeded(f"the rendered messages are longer than {max_chars} characters", param="messages")
        yield piece


def _plain_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid("each message must be an object")
    plain: dict[str, Any] = plain_data(message)
    role = plain.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"role must be one of {', '.join(sorted(ROLES))}")
    if "content" in plain:
        plain["content"] = _text_content(plain["content"])
    return plain


def _text_content(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid("content must be a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _invalid('a content part must be {"type": "text", "text": ...}: this model reads only text')
        texts.append(part["text"])
    return "".join(texts)


def _valid_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise _invalid("a message holds a lone surrogate, which is not valid Unicode") from exc
    return str(text)


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(message, param="messages")
