"""Every answer of a gateway that a test sees is held to OpenAI's document, whoever asked for it and however.

Answers are taken where gateways give them to their connections (`answer_tap`): those of this process, and those that
tests start (`answer_files`). Of a gateway that is neither, a container's, they are taken where a client in this
process, those of OpenAI's and Anthropic's libraries included, reads them. They are judged behind the test that saw
them, outside of its event loop and its times; a fault fails that test. What was judged is told at the end of the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from functools import wraps
from typing import Any

import httpx
import httpx2
import pytest

from tests import answer_files, openai_oracle
from tests.answer_tap import PUBLIC, Answer, Taking, watch_gateways

MAX_TOLD = 10


class Watch:
    """Answers that were seen and not yet judged."""

    def __init__(self, elsewhere: answer_files.AnswerReader) -> None:
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._given: list[Answer] = []
        self._read: list[Answer] = []
        self._request_ids: set[str] = set()
        """Of answers that were taken at a gateway."""
        self.only_read = 0
        """How many answers were taken where a client read them, as their gateway could not be watched."""

    def take(self, method: str, path: str) -> Taking:
        """An answer that a gateway of this process gives."""
        return Answer(method, path, keep=self._give)

    def add_read(self, answer: Answer) -> None:
        """An answer that a client of this process read."""
        with self._lock:
            self._read.append(answer)

    def faults(self) -> list[str]:
        """Of all that came since this was asked last."""
        with self._lock:
            given, self._given, read, self._read = self._given, [], self._read, []
        # a client's answer was written by its gateway before, so this comes after those
        given += self._elsewhere.answers()
        self._request_ids |= {answer.request_id for answer in given} | self._elsewhere.request_ids()
        read = [answer for answer in read if answer.request_id not in self._request_ids]
        self.only_read += len(read)
        return [fault for answer in given + read if answer.judged for fault in self._judge(answer)]

    def told(self) -> str:
        """What was judged; empty when nothing was."""
        kinds = ", ".join(f"{name} {count}" for name, count in openai_oracle.answers.most_common() if name)
        told = f"{openai_oracle.values.total()} values and events of answers, {kinds}" if kinds else ""
        return f"{told}; {self.only_read} only where a client read them" if told and self.only_read else told

    def _give(self, answer: Answer) -> None:
        with self._lock:
            self._given.append(answer)

    def _judge(self, answer: Answer) -> list[str]:
        body = bytes(answer.content)
        try:
            found = openai_oracle.all_faults(answer.method, answer.path, answer.status, answer.kind, body)
        except (ValueError, KeyError, TypeError) as exc:
            found = [f"cannot be read as one of OpenAI's: {exc!r}"]
        return [f"{answer.method} {answer.path} {answer.status}: {fault}" for fault in found]


WATCH = Watch(answer_files.AnswerReader(answer_files.folder()))

# ---------------------------------------------------------------------------------------------- what clients read


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
    """A response whose body is taken as it is read, unless it is no gateway's."""
    path, request_id = request.url.path, response.headers.get("x-request-id", "")
    if path.startswith(PUBLIC) and request_id:
        answer = Answer(request.method, path, keep=WATCH.add_read)
        answer.head(response.status_code, response.headers.get("content-type", ""), request_id)
        response.stream = _Read(response.stream, answer)
    return response


class _Read(httpx.SyncByteStream, httpx.AsyncByteStream, httpx2.SyncByteStream, httpx2.AsyncByteStream):
    def __init__(self, stream: Any, answer: Answer) -> None:
        self._stream, self._answer = stream, answer

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._answer.body(part, whole=False)
            yield part
        self._answer.whole = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._answer.body(part, whole=False)
            yield part
        self._answer.whole = True

    def close(self) -> None:
        self._answer.over()
        self._stream.close()

    async def aclose(self) -> None:
        self._answer.over()
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
        watch_gateways(WATCH.take)
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
    if told := WATCH.told():
        terminalreporter.write_line(f"held to OpenAI's document: {told}")
