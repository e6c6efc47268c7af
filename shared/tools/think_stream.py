"""Text of an output to what was thought and what is said, as it comes. Pure.

Thoughts stand between `<think>` and `</think>` at the beginning of an output, or behind a prompt that opened them.
Space around thoughts belongs to nobody.
"""

from __future__ import annotations

from shared.tools.formats import END_THINK, THINK
from shared.tools.held_text import held_suffix

_SPACE = " \t\r\n"


class ThinkStream:
    """The thoughts of one output.

    Args:
        inside: the prompt has opened them already.
    """

    def __init__(self, inside: bool = False) -> None:
        self._state = "opened" if inside else "begin"  # begin, opened, thoughts, closed, said
        self._held = ""
        self._pushed = 0
        self._length: int | None = None

    @property
    def length(self) -> int:
        """Characters of the output that belong to thoughts, their marks included."""
        if self._length is not None:
            return self._length
        return self._pushed if self._state in ("opened", "thoughts") else 0

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, what is said) that this text completes."""
        thoughts, rest = "", self._held + text
        self._pushed += len(text)
        self._held = ""
        if self._state == "begin":
            body = rest.lstrip(_SPACE)
            if body.startswith(THINK):
                self._state, rest = "opened", body[len(THINK) :]
            elif THINK.startswith(body):
                self._held = rest
                return "", ""
            else:
                self._state = "said"
        if self._state in ("opened", "thoughts"):
            thoughts, rest = self._think(rest)
        if self._state == "closed":
            rest = rest.lstrip(_SPACE)
            self._state = "said" if rest else "closed"
        return thoughts, rest

    def finish(self) -> tuple[str, str]:
        """No more text comes: what was held back."""
        held, self._held = self._held, ""
        if self._state in ("opened", "thoughts"):
            return ("" if self._state == "opened" else held.rstrip(_SPACE)), ""
        return "", held

    def _think(self, text: str) -> tuple[str, str]:
        if self._state == "opened":
            text = text.lstrip(_SPACE)
            if text and not (text != END_THINK and END_THINK.startswith(text)):
                self._state = "thoughts"
        at = text.find(END_THINK)
        if at >= 0:
            self._state = "closed"
            self._length = self._pushed - len(text) + at + len(END_THINK)
            return text[:at].rstrip(_SPACE), text[at + len(END_THINK) :]
        kept = text[: len(text) - held_suffix(text, END_THINK)].rstrip(_SPACE)
        self._held = text[len(kept) :]
        return kept, ""
