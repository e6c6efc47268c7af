"""Keyed requests at this gateway: run here, or followed where another gateway runs them.

There is one entry for each key in use. Its task asks policy whose the record is; when it is ours the request is run
here, else the record is read until it is complete, or ours because its owner died. Clients read the entry's log, as
many as there are; without any for `linger_s` it is given up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

import msgspec

from services.gateway import keyed_run
from services.gateway.event_log import EventLog, Place, parse_place
from services.gateway.keyed_run import LATE_TRIES, Begun, KeyedRun, Write
from shared.bus.bus import NO_RESPONDERS
from shared.contracts import idempotency_messages as i
from shared.contracts.errors import BatonError, Internal, InvalidInput, OtherBody, Unavailable
from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.ingress.ingress import SHUTTING_DOWN

log = logging.getLogger("baton.gateway")

MAX_KEY_CHARS = 255
MOST_PAUSES = 4
"""While policy does not answer, every key in use asks it less and less often, down to once in so many pauses."""
POLL_S = 0.3
"""A request that another gateway runs is looked at so often."""

Ask = Callable[[i.IdempotencyClaim], Awaitable[i.IdempotencyState]]
Begin = Callable[[KeyedRun], Awaitable[Begun]]
"""Starts the request of a run. Raises what keeps it from running."""
MakeRun = Callable[[Write, TenantId, IngressId, i.IdempotencyState], KeyedRun]


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key as the gateway knows it. `place`: of a client that resumes a stream. `keyed`: of a stored response
    under an Idempotency-Key, the id of that key's record."""

    tenant: TenantId
    key_hash: bytes
    name: bytes
    body: bytes
    place: Place | None = None
    keyed: RequestId | None = None


def idempotency_key(headers: Mapping[str, str]) -> str:
    """The `Idempotency-Key` header; empty when there is none. Raises InvalidInput naming the header."""
    key = headers.get("idempotency-key")
    if key is None:
        if "last-event-id" in headers:
            raise InvalidInput("only a stream with an Idempotency-Key can be resumed", param="Last-Event-ID")
        return ""
    if not 0 < len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        message = f"an Idempotency-Key has 1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise InvalidInput(message, param="Idempotency-Key")
    return key


def make_key(tenant: TenantId, key_hash: bytes, route: str, headers: Mapping[str, str], body: bytes) -> Key:
    """What `headers` and `body` of a request to `route` stand for; it has a key. Raises InvalidInput."""
    key = idempotency_key(headers)
    last = headers.get("last-event-id")
    digest = hashlib.sha256
    name = digest(f"{route}\n{key}".encode()).digest()
    return Key(tenant, key_hash, name, digest(_canonical(body)).digest(), None if last is None else parse_place(last))


def _canonical(body: bytes) -> bytes:
    """The same bytes for what is the same JSON, however a client writes it."""
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    return body


class _Unanswered(Exception):
    """A claim that policy may have heard."""

    def __init__(self, error: Unavailable) -> None:
        super().__init__(error)
        self.error = error


class Entry:
    """One key in use here.

    Attributes:
        log: of the run that is read now; another run's when the request was taken over.
        run: here; None while another gateway runs it.
        error: why it ended without an answer.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.state: i.IdempotencyState | None = None
        self.log = EventLog(0)
        self.run: KeyedRun | None = None
        self.error: BatonError | None = None
        self.parts_read = 0
        """Of the log's run, where another gateway runs it."""
        self.readers = 0
        self.left = asyncio.Event()
        """Nobody reads."""
        self.given_up = False
        """Nobody has read for long: it ends."""
        self.pinned = False
        """It goes on without readers."""
        self.ready = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def switch(self, to: EventLog) -> None:
        """Readers go on in another log."""
        self.parts_read = 0
        old, self.log = self.log, to
        old.extend([])  # wakes them

    def fail(self, error: BatonError) -> None:
        """It ends here."""
        self.error = error
        self.ready.set()
        self.log.extend([], last=True)

    @property
    def ends_early(self) -> bool:
        """True when it was given up before its answer was complete: nothing more comes."""
        return self.given_up and not self.pinned and not self.log.complete

    def attach(self) -> None:
        """A client reads."""
        self.readers += 1
        self.left.clear()

    def detach(self) -> None:
        """It left."""
        self.readers -= 1
        if not self.readers:
            self.left.set()


class Once:
    """All of them.

    Args:
        ask, write: of policy. Both raise Unavailable; `ask` with SHUTTING_DOWN when this gateway stops.
        linger_s: how long an entry goes on that nobody reads.
        make_run: of what is run here.
    """

    def __init__(
        self, ask: Ask, write: Write, ingress: IngressId, linger_s: float, make_run: MakeRun = KeyedRun
    ) -> None:
        self._make_run = make_run
        self._ask = ask
        self._write = write
        self._ingress = ingress
        self._linger_s = linger_s
        self._entries: dict[tuple[TenantId, bytes], Entry] = {}

    @property
    def entries(self) -> int:
        """Keys in use here."""
        return len(self._entries)

    async def enter(self, key: Key, begin: Begin) -> Entry:
        """The entry of a key, to which the caller is attached and must `detach` from. Its answer may be yet to come.

        Raises OtherBody, NotFound for a stream that cannot be resumed, Unavailable, and what `begin` raises.
        """
        name = (key.tenant, key.name)
        while (entry := self._entries.get(name)) is not None and entry.ends_early:
            assert entry.task is not None
            await asyncio.wait({entry.task})  # then it is begun anew
        if entry is None:
            entry = self._entries[name] = Entry(key.body)
            entry.task = asyncio.create_task(self._work(name, entry, key, begin))
        elif entry.body != key.body:
            raise OtherBody("this Idempotency-Key stands for another request", param="Idempotency-Key")
        entry.attach()
        try:
            await entry.ready.wait()
            if entry.error is not None:
                raise copy(entry.error)  # the one that is kept would keep its readers' frames
        except BaseException:
            entry.detach()
            raise
        return entry

    # ------------------------------------------------------------------------------------------ an entry's task

    async def _work(self, name: tuple[TenantId, bytes], entry: Entry, key: Key, begin: Begin) -> None:
        unanswered = False
        try:
            try:
                await self._drive(entry, key, begin)
            except _Unanswered as exc:
                unanswered = True
                entry.fail(exc.error)
            except BatonError as error:
                entry.fail(error)
            except Exception:
                log.exception("a keyed request failed")
                entry.fail(Internal("internal error"))
            if unanswered:
                del begin  # it has the prompt, and this may take minutes
                await self._give_back(key)  # whoever comes meanwhile is told the same
        finally:
            del self._entries[name]

    async def _drive(self, entry: Entry, key: Key, begin: Begin) -> None:
        leaving = asyncio.create_task(self._unread(entry))
        try:
            state = await self._claim(key)
            while state.outcome != i.YOURS:
                if self._read(entry, state) or leaving.done():
                    return
                if not state.more:
                    await asyncio.sleep(POLL_S)
                state = await self._look(key, entry, state)
            run = self._make_run(self._write, key.tenant, self._ingress, state)
            await self._run(entry, run, begin, leaving)
        finally:
            leaving.cancel()

    async def _claim(self, key: Key) -> i.IdempotencyState:
        try:
            return await self._ask(self._question(key))
        except Unavailable as exc:
            if exc.code in (SHUTTING_DOWN, NO_RESPONDERS):
                raise
            raise _Unanswered(exc) from exc

    async def _give_back(self, key: Key) -> None:
        """A claim was not answered: if it made the record ours, nobody else would get it as long as we live."""
        question = msgspec.structs.replace(self._question(key), resume=True)
        for tried in range(LATE_TRIES):
            await asyncio.sleep(keyed_run.LATE_PAUSE_S * min(2**tried, MOST_PAUSES))
            try:
                state = await self._ask(question)
            except Unavailable as exc:
                if exc.code == SHUTTING_DOWN:
                    return
            except BatonError:
                return  # there is none, or it is not ours
            else:
                if state.outcome == i.YOURS:
                    run = self._make_run(self._write, key.tenant, self._ingress, state)
                    await run.release()
                    await run.kept()
                return

    async def _run(self, entry: Entry, run: KeyedRun, begin: Begin, leaving: asyncio.Task[None]) -> None:
        try:
            begun = await begin(run)
        except BaseException as exc:
            await run.release(exc)
            raise
        entry.state, entry.run, entry.pinned = run.state, run, run.goes_on_alone
        entry.switch(run.log)
        entry.ready.set()
        leaving.add_done_callback(lambda task: None if task.cancelled() else run.cancel())
        await run.work(begun)
        await run.kept()

    def _read(self, entry: Entry, state: i.IdempotencyState) -> bool:
        """Take in what another gateway wrote. True once the answer is complete."""
        entry.state = state
        if state.run != entry.log.run:
            entry.switch(EventLog(state.run))
        for part in state.parts:
            entry.log.feed(part)
            entry.parts_read += 1
        entry.ready.set()
        return entry.log.complete

    async def _look(self, key: Key, entry: Entry, known: i.IdempotencyState) -> i.IdempotencyState:
        try:
            return await self._ask(self._question(key, known.run, entry.parts_read))
        except Unavailable as exc:
            if exc.code == SHUTTING_DOWN:
                raise
            # policy comes back
            return msgspec.structs.replace(known, outcome=i.RUNNING, parts=(), more=False)

    def _question(self, key: Key, known_run: int = 0, known_parts: int = 0) -> i.IdempotencyClaim:
        return i.IdempotencyClaim(
            key_hash=key.key_hash,
            name=key.name,
            body=key.body,
            ingress_id=self._ingress,
            seed=secrets.randbits(64),
            resume=key.place is not None,
            known_run=known_run,
            known_parts=known_parts,
            keyed=key.keyed or RequestId(""),
        )

    async def _unread(self, entry: Entry) -> None:
        """Returns when nobody has read for `linger_s`, and the entry is given up."""
        while not entry.given_up:
            await entry.left.wait()
            await asyncio.sleep(self._linger_s)
            if entry.pinned:
                await asyncio.Event().wait()  # for ever
            entry.given_up = entry.left.is_set()
