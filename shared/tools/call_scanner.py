"""One call of a tool, read character by character: `{"name": "f", "arguments": {…}}`, in any pieces. Pure.

It finds the members of the outermost object and nothing more: what stands inside the arguments is passed on as it is.
"""

from __future__ import annotations

import json

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}


class CallScanner:
    """Takes characters until `done` or `broken`.

    Attributes:
        name: the tool's, once it is known.
        done: the object is closed.
        broken: this is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._state = "object"  # what comes next: object, key, colon, value, comma
        self._key = ""
        self._value: list[str] = []
        self._open: list[str] = []  # brackets to close inside the value
        self._in_string = self._escaped = self._reading_key = False
        self._ready: list[str] = []
        self._has_arguments = False

    def push(self, char: str) -> None:
        """Take one character. Not to be called once it is done or broken."""
        if self._state == "value" and self._value:
            self._inside(char)
        elif char not in _SPACE:
            self._between(char)

    def take_arguments(self) -> str:
        """The text of the arguments that came since the last call; `{}` where the call ends without any."""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            self._ready.append("{}")
        text = "".join(self._ready)
        self._ready.clear()
        return text

    # ------------------------------------------------------------------------------------------ parts

    @property
    def _is_argument(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._has_arguments

    @property
    def _streams(self) -> bool:
        """True inside arguments that are an object, whose text is passed on as it comes."""
        return self._is_argument and self._value[0] == "{"

    def _between(self, char: str) -> None:
        state = self._state
        if state == "object" and char == "{":
            self._state = "key"
        elif state == "key" and char == "}" and not self._key:
            self.done = True
        elif state == "key" and char == '"':
            self._key, self._state = "", "value"  # a key is read as a value is
            self._begin(char, is_key=True)
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "value":
            self._begin(char, is_key=False)
        elif state == "comma" and char == ",":
            self._state = "key"
        elif state == "comma" and char == "}":
            self.done = True
        else:
            self.broken = True

    def _begin(self, char: str, *, is_key: bool) -> None:
        self._reading_key = is_key
        self._value = [char]
        self._open = [_CLOSING[char]] if char in _CLOSING else []
        self._in_string, self._escaped = char == '"', False
        if char in "}]:,":
            self.broken = True
        elif not is_key and self._streams:
            self._ready.append(char)

    def _inside(self, char: str) -> None:
        scalar = not self._open and self._value[0] != '"'
        if scalar and (char in _SPACE or char in ",}"):
            self._end()
            if not self.broken and char not in _SPACE:
                self._between(char)
            return
        if scalar and char in '{}[]":':
            self.broken = True
            return
        self._value.append(char)
        if scalar:
            return
        if not self._reading_key and self._streams:
            self._ready.append(char)
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char in "}]" and (not self._open or self._open.pop() != char):
            self.broken = True
            return
        if not self._in_string and not self._open:
            self._end()

    def _end(self) -> None:
        """A key or a value is complete."""
        text = "".join(self._value)
        self._value = []
        if self._reading_key:
            key = self._string(text)
            self._key, self._state = key or "", "colon"
            return
        if self._key == "name":
            self.name = self._string(text)
            self.broken = self.broken or not self.name
        elif self._is_argument:
            self._end_arguments(text)
        elif not self._is_json(text):
            self.broken = True
        self._state = "comma"

    def _end_arguments(self, text: str) -> None:
        if text.startswith('"'):  # some models quote the object
            text = self._string(text) or ""
            self._ready.append(text)
        elif text == "null":
            self._ready.append("{}")
        elif not text.startswith("{"):
            self.broken = True
        self.broken = self.broken or not (text == "null" or self._is_json(text))
        self._has_arguments = True

    def _string(self, text: str) -> str | None:
        try:
            value = str(json.loads(text, strict=False))
            value.encode()  # half of a surrogate pair could not be sent
        except ValueError:
            self.broken = True
            return None
        return value

    @staticmethod
    def _is_json(text: str) -> bool:
        try:
            json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return False
        return True
