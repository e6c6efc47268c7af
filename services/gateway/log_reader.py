"""One client's way through a log, from where it is: in this run, or in another one that says the same. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.event_log import DATA, EventLog, Place, Reach, is_plain, json_of, text_of
from shared.contracts.errors import Conflict
from shared.text.line_ends import in_lines

NOTHING = Reach()


class LogReader:
    """Reads a log's events as they come.

    A client may be ahead of the log's events: it has text from a run whose owner died, and this run is not so far. What
    it has is left out then, by characters.

    Args:
        place: where the client is; None: at the beginning.
    """

    def __init__(self, log: EventLog, place: Place | None) -> None:
        self.log = log
        self._asked = place if place is not None and (place.index or place.reached) else None
        self._index = 0
        self._ahead: list[Reach] = []
        """What the client has of each choice beyond the events read: characters, and a finish reason of its own."""
        self._known = True
        """The client has what stands before this run's text."""
        self._begun = False

    @property
    def waits(self) -> bool:
        """True while a client of this very run has more than is here: its owner wrote less than it sent."""
        asked = self._asked
        behind = asked is not None and asked.run == self.log.run and asked.index > len(self.log.events)
        return behind and not self._begun and not self.log.complete

    @property
    def place(self) -> Place | None:
        """Where the client is now."""
        if not self._begun:
            return self._asked
        at = self.log.place(self._index)
        if at.index and not at.reached:
            return at
        count = max(len(at.reached), len(self._ahead))
        reached = (_sum(_get(at.reached, i), _get(self._ahead, i)) for i in range(count))
        return Place(at.run, at.index, tuple(reached))

    def read(self) -> list[tuple[Place, bytes]]:
        """The events since the last call, each with the client's place behind it.

        Raises Conflict when this log cannot tell where the client is.
        """
        if self.waits:
            return []
        self._begin()
        found = []
        while self._index < len(self.log.events):
            event = self._left(self.log.events[self._index])
            self._index += 1
            place = self.place
            if event is not None and place is not None:
                found.append((place, event))
        return found

    def _begin(self) -> None:
        asked = self._asked
        if self._begun or asked is None:
            self._begun = True
            return
        if asked.run == self.log.run:
            if asked.index > len(self.log.events):
                raise Conflict("Last-Event-ID lies behind the end of the stream", param="Last-Event-ID")
            self._index = asked.index
        elif not asked.reached:
            raise _cannot()
        at = self.log.place(self._index).reached
        self._ahead = [_difference(reach, _get(at, i)) for i, reach in enumerate(asked.reached)]
        self._known = asked.run == self.log.run
        self._begun = True

    def _left(self, event: bytes) -> bytes | None:
        """The event without what the client has; None when nothing is left."""
        if self._known and all(reach == NOTHING for reach in self._ahead):
            return event
        found = json_of(event)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not choices:
            return event  # usage and [DONE] come last: a client that had them would not ask
        left = [choice for choice in choices if self._cut(choice)]
        if not left:
            return None
        # behind the chunks that only name a role, one that is left whole is the first piece of news
        self._known |= any(text_of(choice) for choice in left)
        return DATA + in_lines(msgspec.json.encode({**found, "choices": left}))

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Take from a choice's chunk what the client has. False when that was all."""
        index = choice.get("index", 0)
        if index >= len(self._ahead):
            return True
        ahead, text, ends = self._ahead[index], text_of(choice), bool(choice.get("finish_reason"))
        if not is_plain(choice):
            if ahead != NOTHING:
                raise _cannot()
            return True
        self._ahead[index] = Reach(max(0, ahead.chars - len(text)), ahead.finished and not ends)
        rest = text[ahead.chars :]
        if ahead.chars and "text" in choice:
            choice["text"] = rest
        elif ahead.chars and "content" in choice.get("delta", {}):
            choice["delta"] = {"content": rest}
        return bool(rest) or (ends and not ahead.finished)


def _cannot() -> Conflict:
    return Conflict("the stream was begun anew, and cannot be resumed: send it without Last-Event-ID")


def _get(reached: tuple[Reach, ...] | list[Reach], index: int) -> Reach:
    return reached[index] if index < len(reached) else NOTHING


def _sum(one: Reach, other: Reach) -> Reach:
    return Reach(one.chars + other.chars, one.finished or other.finished)


def _difference(client: Reach, log: Reach) -> Reach:
    return Reach(max(0, client.chars - log.chars), client.finished and not log.finished)
