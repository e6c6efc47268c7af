"""Stop strings found in a stream of text, across token borders.

Pure. The rule: the match that *ends* first in the text wins; of several that end there, the longest, which starts
first. It is decided code point by code point, so it does not depend on how the text was split. Cost is linear in the
text and independent of the number of stop strings (Aho and Corasick, "Efficient string matching", 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shared.contracts.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found.

    `num_tokens` counts the tokens needed to complete it, from the first one of the output. The stop string is not part
    of the text returned.
    """

    stop: str
    num_tokens: int


class StopStrings:
    """Matcher for one output.

    After every push, the text returned so far plus the text held equals the text pushed, and what is held is the
    longest suffix that begins a stop string. So nothing is sent that a later match would take back.

    Args:
        stops: none of them empty; duplicates are harmless; may be empty, and then nothing is ever held.

    Raises:
        InvalidInput: an empty stop string (param `stop`).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidInput("a stop string must not be empty", param="stop")
        self._automaton = _automaton(tuple(stops))
        self._state = 0
        self.match: StopMatch | None = None

    def push(self, token_index: int, delta: str) -> str:
        """Take the text that one token completed; returns what may be sent now.

        Args:
            token_index: index of the token in the output, from 0.
            delta: its text, possibly empty.

        After a match, which `match` then holds, the text before it has been returned and every further push returns "".
        """
        if self.match is not None:
            return ""
        automaton, held = self._automaton, self._state
        state = held
        for i, char in enumerate(delta):
            state = automaton.step(state, char)
            stop = automaton.match[state]
            if stop:
                self.match = StopMatch(stop, token_index + 1)
                self._state = 0
                return self._sendable(held, delta, automaton.depth[held] + i + 1 - len(stop))
        self._state = state
        return self._sendable(held, delta, automaton.depth[held] + len(delta) - automaton.depth[state])

    def flush(self) -> str:
        """The text still held, when the output ended without a match."""
        held, self._state = self._state, 0
        return self._automaton.text(held)

    def _sendable(self, held: int, delta: str, count: int) -> str:
        """The first `count` code points of the text held in state `held` followed by `delta`."""
        depth = self._automaton.depth[held]
        if count <= depth:
            return self._automaton.text(held, count)
        return self._automaton.text(held) + delta[: count - depth]


class _Automaton:
    """Trie of the stop strings; state 0 is its root.

    A state stands for the string that leads to it. The matcher's state is the longest suffix of the text that begins a
    stop string, so it is also the text that must be held.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [""]
        """Per state: the longest stop string that is a suffix of it; "" if none."""
        self.fail = [0]
        """Per state: the state of its longest proper suffix that is one."""
        self._stop = [""]
        """Per state: a stop string that begins with it."""
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and char not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(char, 0)

    def text(self, state: int, count: int | None = None) -> str:
        """The string of a state, or its first `count` code points."""
        return self._stop[state][: self.depth[state] if count is None else count]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append("")
                self.fail.append(0)
                self._stop.append(stop)
            state = self.next[state][char]
        self.match[state] = stop

    def _link(self) -> None:
        # breadth first: a suffix is shorter, so its own link is known by then
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                if not self.match[child]:
                    self.match[child] = self.match[self.fail[child]]
                queue.append(child)


@lru_cache(maxsize=8)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """The automaton of some stop strings; built, it never changes, so the choices of a request share it."""
    return _Automaton(stops)
