"""Text of an output to content and calls of tools, as it comes. Pure.

What is returned does not depend on how the text was split, but for where the pieces' borders lie. A call is one only
when its object is read up to the name and the name is one of the tools'; else all of it is content, as it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shared.tools.call_scanner import CallScanner
from shared.tools.formats import ToolFormat
from shared.tools.held_text import held_suffix

_SPACE = " \t\r\n"
_CHUNK = 256
"""Characters taken at once: reading a call one by one costs a copy of the rest."""


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what is said."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which joined are JSON."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class ToolStream:
    """The calls in one output.

    Args:
        names: of the tools; another name is no call.
        most: calls beyond so many are dropped; 0 = no limit.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], most: int = 0) -> None:
        self._form = form
        self._names = names
        self._most = most
        self._pieces: list[Piece] = []
        self._state = "begin" if form.bare else "text"  # begin, text, list, call, behind, skip
        self._held = ""  # what may turn out to be a marker, or space before a call
        self._raw: list[str] = []  # of a call that may turn out to be none, from its marker on
        self._scanner = CallScanner()
        self._number = -1  # of the call being read, once it is known to be one
        self._started = 0
        self.num_calls = 0
        """Complete ones."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        for start in range(0, len(text), _CHUNK):
            rest = text[start : start + _CHUNK]
            while rest:
                rest = self._step(rest)
        return self._take()

    def finish(self) -> list[Piece]:
        """No more text comes: what was held back is content after all."""
        if self._state in ("list", "call") and self._number < 0:
            self._say("".join(self._raw))
        elif self._state in ("begin", "text") and not (self._started and self._held.isspace()):
            self._say(self._held)
        self._held, self._state = "", "text"
        self._raw.clear()
        return self._take()

    def _step(self, text: str) -> str:
        """Take some of `text`; returns the rest."""
        match self._state:
            case "begin":
                return self._begin(text)
            case "text":
                return self._text(text)
            case "list":
                return self._list(text)
            case "call":
                return self._call(text)
            case "behind":
                return self._behind(text)
            case _:
                return self._skip(text)

    # ------------------------------------------------------------------------------------------ outside of calls

    def _begin(self, text: str) -> str:
        text, self._held = self._held + text, ""
        body = text.lstrip(_SPACE)
        if body.startswith("{"):
            self._open(text[: len(text) - len(body)])
            return body
        if len(body) < len(self._form.open) and self._form.open.startswith(body):
            self._held = text
            return ""
        self._state = "text"
        return text

    def _text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        at = text.find(self._form.open)
        border = at if at >= 0 else len(text) - held_suffix(text, self._form.open)
        said = text[:border].rstrip(_SPACE)  # space before a call is not said
        self._say(said)
        if at < 0:
            self._held = text[len(said) :]
            return ""
        self._open(text[len(said) : at + len(self._form.open)])
        return text[at + len(self._form.open) :]

    def _open(self, marker: str) -> None:
        self._raw = [marker]
        self._state = "list" if self._form.listed else "call"
        self._next_call()

    def _next_call(self) -> None:
        self._scanner, self._number = CallScanner(), -1

    # ------------------------------------------------------------------------------------------ inside of them

    def _list(self, text: str) -> str:
        self._raw.append(text[0])
        if text[0] == "[":
            self._state = "call"
        elif text[0] not in _SPACE:
            self._no_call()
        return text[1:]

    def _call(self, text: str) -> str:
        self._raw.append(text[0])
        self._scanner.push(text[0])
        if not self._scanner.broken:
            self._report()
            if self._scanner.done and self._number >= 0:
                self.num_calls += self._counts
                self._state = "behind"
                self._raw.clear()
        if self._scanner.broken or (self._scanner.done and self._number < 0):
            self._no_call()
        return text[1:]

    @property
    def _counts(self) -> bool:
        return not self._most or self._number < self._most

    def _report(self) -> None:
        """Say what is known of the call."""
        scanner = self._scanner
        if self._number < 0:
            if scanner.name is None or scanner.name not in self._names:
                return
            self._number, self._started = self._started, self._started + 1
            self._raw.clear()
            if self._counts:
                self._pieces.append(CallStart(self._number, scanner.name))
        arguments = scanner.take_arguments()
        if arguments and self._counts:
            self._pieces.append(CallArguments(self._number, arguments))

    def _no_call(self) -> None:
        """What was read is content; a call that has begun stays one, and nothing up to its end is content."""
        if self._number >= 0:
            self._state = "skip"
        else:
            self._say("".join(self._raw))
            self._state = "text"
        self._raw.clear()

    # ------------------------------------------------------------------------------------------ behind them

    def _skip(self, text: str) -> str:
        """Up to the marker that closes a call which broke off."""
        text, self._held = self._held + text, ""
        close = self._form.close
        if not close:
            return ""
        at = text.find(close)
        if at >= 0:
            self._state = "text"
            return text[at + len(close) :]
        self._held = text[len(text) - held_suffix(text, close) :]
        return ""

    def _behind(self, text: str) -> str:
        """A closing marker, or a separator and the next call; space there belongs to nobody. Or else content."""
        form, char = self._form, text[0]
        if char in _SPACE and not self._held:
            return text[1:]
        if form.close:
            self._held += char
            if self._held == form.close:
                self._held, self._state = "", "text"
            elif not form.close.startswith(self._held):
                self._state = "text"  # which looks at what is held
            return text[1:]
        if form.listed and char == "]":
            self._state = "text"
        elif char == form.separator:
            self._state = "call"
            self._next_call()
        elif form.bare and char == "{":
            self._state = "call"
            self._next_call()
            return text
        else:
            self._state = "text"
            return text
        return text[1:]

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring pieces of one kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            result[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            result.append(piece)
    return result
