"""The answer to one client of a stored response, read from its entry's log: whole, or from an event on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.gateway.event_log import FRAME_END, EventLog
from services.gateway.keyed_answer import KeyedAnswer
from services.gateway.once import Entry
from services.gateway.stored_run import EVENTS_A_RUN
from shared.contracts.errors import Conflict, InvalidInput


class StoredAnswer(KeyedAnswer):
    """Sends what a log holds and what comes. A client that leaves is only one reader less.

    Args:
        entry: attached to already.
        headers: added to every form of the answer.
        after: number of the last event that the client has; -1: none.
    """

    def __init__(self, entry: Entry, headers: Mapping[str, str], after: int = -1) -> None:
        super().__init__(entry, None, headers)
        self._run, self._index = (after // EVENTS_A_RUN + 1, after % EVENTS_A_RUN + 1) if after >= 0 else (0, 0)

    def _news_of(self, log: EventLog) -> Callable[[], bytes]:
        if self._run not in (0, log.run):
            raise Conflict(
                "the response was begun anew at another gateway: ask without starting_after", param="starting_after"
            )
        if log.complete and self._index > len(log.events):
            raise InvalidInput("starting_after lies behind the response's last event", param="starting_after")
        self._run = log.run

        def news() -> bytes:
            events = log.events[self._index :]
            self._index += len(events)
            return b"".join(event + FRAME_END for event in events)

        return news
