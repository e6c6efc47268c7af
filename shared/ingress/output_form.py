"""How the text of an output is read: thoughts, calls of tools and what is said. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.text.tokenizer import Tokenizer
from shared.tools.formats import END_THINK, THINK, ToolFormat
from shared.tools.grammar import Thoughts
from shared.tools.think_stream import ThinkStream
from shared.tools.tool_stream import CallArguments, CallStart, Content, ToolStream, joined


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What to look for in an output.

    Attributes:
        tools: names of the tools that may be called; empty: calls are not looked for.
        most_calls: 0 = no limit.
        thoughts: None: none are looked for.
    """

    format: ToolFormat | None = None
    tools: tuple[str, ...] = ()
    most_calls: int = 0
    thoughts: Thoughts | None = None

    @property
    def is_plain(self) -> bool:
        """True when an output is nothing but what is said."""
        return self.thoughts is None and not self.tools


PLAIN = OutputForm()


@dataclass(slots=True)
class Parsed:
    """What some text came to."""

    thoughts: str = ""
    said: str = ""
    calls: list[CallStart | CallArguments] = field(default_factory=list)
    in_order: list[Content | CallStart | CallArguments] = field(default_factory=list)
    """What is said and the calls, as they came; where calls are looked for."""

    def __bool__(self) -> bool:
        return bool(self.thoughts or self.said or self.calls)


class OutputParser:
    """Reads one output."""

    def __init__(self, form: OutputForm) -> None:
        self._thinking = None if form.thoughts is None else ThinkStream(form.thoughts.inside)
        wanted = form.format is not None and form.tools
        self._tools = ToolStream(form.format, frozenset(form.tools), form.most_calls) if wanted else None  # type: ignore[arg-type]

    def push(self, text: str) -> Parsed:
        """What the next text comes to."""
        thoughts, said = ("", text) if self._thinking is None else self._thinking.push(text)
        return self._parsed(thoughts, said, ends=False)

    def finish(self) -> Parsed:
        """What was held back: no more text comes."""
        thoughts, said = ("", "") if self._thinking is None else self._thinking.finish()
        return self._parsed(thoughts, said, ends=True)

    @property
    def thought_chars(self) -> int:
        """Characters of the output that belong to thoughts."""
        return 0 if self._thinking is None else self._thinking.length

    def reason(self, finish: str) -> str:
        """The finish reason of an output that ended with `finish`."""
        called = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if called and finish == "stop" else finish

    def _parsed(self, thoughts: str, said: str, *, ends: bool) -> Parsed:
        parsed = Parsed(thoughts, said)
        if self._tools is None:
            return parsed
        pieces = self._tools.push(said) + (self._tools.finish() if ends else [])
        parsed.in_order = joined(pieces)
        parsed.said = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        parsed.calls = [piece for piece in pieces if not isinstance(piece, Content)]
        return parsed


def shown_bytes(tokenizer: Tokenizer, form: OutputForm) -> Callable[[int], bytes]:
    """The bytes of a token, as the reader of an output needs them: those of special tokens that are its markers too."""
    markers = [THINK, END_THINK] if form.thoughts is not None else []
    if form.format is not None and form.tools:
        markers += [marker for marker in (form.format.open, form.format.close) if marker]
    special = tokenizer.special_tokens
    shown = {special[marker].id: marker.encode() for marker in markers if marker in special}
    if not shown:
        return tokenizer.token_bytes
    return lambda token_id: shown.get(token_id) or tokenizer.token_bytes(token_id)
