"""Who may read which blocks over TCP: who shows an attempt's lease token, what its commits named, while it lives.

Used from several threads: leases are named and ended on the event loop, and read in the threads of connections.
"""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shared.contracts.attempt import Attempt
from shared.kv.transfer_wire import ReadRequest, Span, refused

NO_LEASE, NOT_NAMED = "no_lease", "not_named"
Stop = Callable[[], None]


@dataclass(slots=True)
class _Lease:
    token: bytes
    spans: set[Span] = field(default_factory=set)
    readings: list[Stop] = field(default_factory=list)
    then: Callable[[], None] | None = None  # once it has ended: called when nobody reads any more


class ReadLeases:
    """At most one lease an attempt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[Attempt, _Lease] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._leases)

    def name(self, attempt: Attempt, token: bytes, spans: Iterable[Span]) -> None:
        """Whoever shows `token`, which is not empty, may read these from now on, and those named before."""
        with self._lock:
            self._leases.setdefault(attempt, _Lease(token)).spans.update(spans)

    @contextlib.contextmanager
    def reading(self, request: ReadRequest, stop: Stop) -> Iterator[None]:
        """While the spans of a request are read. `stop` is called, on any thread, when its lease ends meanwhile.

        Raises:
            Forbidden: code `transfer_refused`. An unknown attempt and a wrong token are told by the same word.
        """
        lease = self._admit(request, stop)
        try:
            yield
        finally:
            self._leave(lease, stop)

    def close(self, attempt: Attempt, then: Callable[[], None]) -> None:
        """End a lease. `then` is called when nobody reads by it any more: at once, or in a reader's thread."""
        with self._lock:
            lease = self._leases.pop(attempt, None)
            stops = list(lease.readings) if lease is not None else []
            if lease is not None and stops:
                lease.then = then
        for stop in stops:
            stop()
        if not stops:
            then()

    def _admit(self, request: ReadRequest, stop: Stop) -> _Lease:
        with self._lock:
            lease = self._leases.get(request.attempt)
            if lease is None or not lease.token or not hmac.compare_digest(lease.token, request.token):
                raise refused(NO_LEASE)
            if not lease.spans.issuperset(request.spans):
                raise refused(NOT_NAMED)
            lease.readings.append(stop)
            return lease

    def _leave(self, lease: _Lease, stop: Stop) -> None:
        with self._lock:
            lease.readings.remove(stop)
            then = lease.then if not lease.readings else None
        if then is not None:
            then()
