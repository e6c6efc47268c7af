"""Every answer of a gateway that a test sees is held to OpenAI's document, whoever asked for it and however.

Answers are taken at two places: where a gateway in this process gives them to its connections, and where a client in
this process, those of OpenAI's and Anthropic's libraries included, reads them from a gateway elsewhere. They are judged
behind the test that saw them, outside of its event loop and its times; a fault fails that test. What was judged is told
at the end of the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import httpx
import httpx2
import pytest

from tests import openai_oracle

MAX_BODY_BYTES = 16 << 20
MAX_TOLD = 10
PUBLIC = "/v1/"
REQUEST_ID = b"x-request-id"


@dataclass
class Answer:
    """One answer as far as it came. `whole`: nothing is missing at its end."""

    method: str
    path: str
    status: int = 0
    kind: str = ""
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False

    @property
    def judged(self) -> bool:
        """Whether it can be looked at: of what broke off, only a stream's events."""
        stream = self.kind.startswith("text/event-stream")
        return self.method != "HEAD" and len(self.body) < MAX_BODY_BYTES and (self.whole or stream)


class Watch:
    """Answers that were seen and not yet judged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Answer] = []
        self._taken: set[bytes] = set()  # request ids of answers that were taken at a gateway

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._seen.append(answer)

    def took(self, headers: dict[bytes, bytes]) -> None:
        """An answer with these headers is taken where it is given."""
        with self._lock:
            self._taken.add(headers.get(REQUEST_ID, b""))

    def was_taken(self, request_id: str) -> bool:
        """Whether an answer that a client now reads was; asked once for each."""
        with self._lock:
            found = request_id.encode() in self._taken
            self._taken.discard(request_id.encode())
        return found

    def faults(self) -> list[str]:
        """Of all that came since this was asked last."""
        with self._lock:
            seen, self._seen = self._seen, []
        return [fault for answer in seen if answer.judged for fault in self._judge(answer)]

    def _judge(self, answer: Answer) -> list[str]:
        try:
            found = openai_oracle.all_faults(answer.method, answer.path, answer.status, answer.kind, bytes(answer.body))
        except (ValueError, KeyError, TypeError) as exc:
            found = [f"cannot be read as one of OpenAI's: {exc!r}"]
        return [f"{answer.method} {answer.path} {answer.status}: {fault}" for fault in found]


WATCH = Watch()

# ---------------------------------------------------------------------------------------------- where they are taken


def watch_gateways() -> None:
    """Take the answers of gateways that this process serves from now on."""
    from services.gateway.server import Listener

    original = Listener.closing

    @wraps(original)
    def closing(self: Listener, app: Any) -> Any:
        return _tapped(original(self, app))

    Listener.closing = closing  # type: ignore[method-assign]


def _tapped(app: Any) -> Any:
    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PUBLIC):
            await app(scope, receive, send)
            return
        answer = Answer(scope["method"], scope["path"])

        def sending(message: Any) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                answer.status, answer.kind = message["status"], headers.get(b"content-type", b"").decode()
                WATCH.took(headers)
            else:
                answer.body += message.get("body", b"")
                answer.whole = not message.get("more_body", False)
            return send(message)  # type: ignore[no-any-return]

        try:
            await app(scope, receive, sending)
        finally:
            WATCH.add(answer)

    return wrapped


def watch_clients(library: Any) -> None:
    """Take what clients of this library, `httpx` or its successor, read from gateways from now on."""
    plain, asynchronous = library.HTTPTransport.handle_request, library.AsyncHTTPTransport.handle_async_request

    @wraps(plain)
    def handle(self: Any, request: Any) -> Any:
        return _watched(request, plain(self, request))

    @wraps(asynchronous)
    async def handle_async(self: Any, request: Any) -> Any:
        return _watched(request, await asynchronous(self, request))

    library.HTTPTransport.handle_request = handle
    library.AsyncHTTPTransport.handle_async_request = handle_async


def _watched(request: Any, response: Any) -> Any:
    """A response whose body is taken as it is read, unless it is no gateway's or is taken there."""
    path, request_id = request.url.path, response.headers.get("x-request-id", "")
    if path.startswith(PUBLIC) and request_id and not WATCH.was_taken(request_id):
        answer = Answer(request.method, path, response.status_code, response.headers.get("content-type", ""))
        response.stream = _Read(response.stream, answer)
    return response


class _Read(httpx.SyncByteStream, httpx.AsyncByteStream, httpx2.SyncByteStream, httpx2.AsyncByteStream):
    def __init__(self, stream: Any, answer: Answer) -> None:
        self._stream, self._answer = stream, answer

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._answer.body += part
            yield part
        self._answer.whole = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._answer.body += part
            yield part
        self._answer.whole = True

    def close(self) -> None:
        WATCH.add(self._answer)
        self._stream.close()

    async def aclose(self) -> None:
        WATCH.add(self._answer)
        await self._stream.aclose()


# ---------------------------------------------------------------------------------------------- the run of tests

watch_clients(httpx)
watch_clients(httpx2)
_gateways_watched = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global _gateways_watched
    # a test that needs no gateway does not load one
    if not _gateways_watched and "services.gateway.server" in sys.modules:
        watch_gateways()
        _gateways_watched = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    faults = WATCH.faults() if call.when in ("call", "teardown") else []
    if faults and report.passed:
        report.outcome = "failed"
        more = f"\nand {len(faults) - MAX_TOLD} more" if len(faults) > MAX_TOLD else ""
        report.longrepr = "OpenAI's document does not allow what was answered:\n" + "\n".join(faults[:MAX_TOLD]) + more
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = ", ".join(f"{name} {count}" for name, count in openai_oracle.answers.most_common() if name)
    if told:
        values = openai_oracle.values.total()
        terminalreporter.write_line(f"held to OpenAI's document: {values} values and events of answers, {told}")
