"""Rolling restarts: which processes, in which order, by whom, and what happens when the new one does not come up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.cli import control, restart
from services.cli.child import ChildFailed
from services.cli.supervisor import Supervisor
from shared.contracts.errors import InvalidInput, Unavailable
from tests.unit.test_supervisor import READY, WAIT, alive, spec, stopping_in, until

INSTANCES = {
    "policy": "policy",
    "prefix-cache-index": "prefix-cache-index",
    "scheduler": "scheduler",
    "batch": "batch",
    "gateway": "gateway",
    "prefill-1": "prefill",
    "decode-1": "decode",
    "decode-2": "decode",
}


def test_services_processes_and_all() -> None:
    def of(*asked: str) -> list[str]:
        return restart.chosen(asked, INSTANCES, ["nats"])

    assert of("decode") == ["decode-1", "decode-2"]
    assert of("decode-2", "policy", "decode") == ["decode-2", "policy", "decode-1"]
    assert of("nats") == ["nats"]
    everything = of("all")
    assert sorted(everything) == sorted(INSTANCES)
    assert everything[-1] == "gateway"
    assert everything.index("scheduler") < everything.index("prefill-1") < everything.index("decode-1")


@pytest.mark.parametrize("name", ["redis", "decode-3", "", "../policy"])
def test_what_is_not_here_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match="known are all, batch, decode") as caught:
        restart.chosen([name], INSTANCES, ["nats"])
    assert caught.value.param == name


async def test_the_successor_is_ready_before_the_old_one_stops(tmp_path: Path) -> None:
    # Given a child that notes at its end whether another reported ready meanwhile
    note = tmp_path / "note"
    code = (
        f"{READY}import os, signal, time\nfrom pathlib import Path\n"
        f"def end(*_): Path({str(note)!r}).write_text(Path(os.environ['BATON_READY_FILE']).read_text()); exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\ntime.sleep(60)\n"
    )
    said: list[str] = []
    supervisor = Supervisor(said.append)
    await supervisor.start([spec(tmp_path, "one", code)])
    watching = asyncio.create_task(supervisor.watch())
    first = supervisor.pids["one"]
    # When it is replaced, twice
    await supervisor.replace("one")
    second = supervisor.pids["one"]
    # Then the old one stopped after the new one was ready, and no guard took its end for a death
    assert json.loads(note.read_text())["pid"] == second != first
    assert not alive(first)
    await supervisor.replace("one")
    assert supervisor.pids.keys() == {"one"}
    await asyncio.sleep(0.4)
    assert said == []
    # And the successor is watched like the first
    third = supervisor.pids["one"]
    os.kill(third, 9)
    await until(lambda: supervisor.pids["one"] != third and alive(supervisor.pids["one"]))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([])
    assert not supervisor.pids


async def test_a_successor_that_fails_leaves_the_old_one_running(tmp_path: Path) -> None:
    switch = tmp_path / "fail"
    code = f"import os\nif os.path.exists({str(switch)!r}): exit('no such luck')\n{READY}{WAIT}"
    supervisor = Supervisor(lambda line: None)
    await supervisor.start([spec(tmp_path, "one", code)])
    first = supervisor.pids["one"]
    switch.touch()
    with pytest.raises(ChildFailed, match="ended with exit code 1") as caught:
        await supervisor.replace("one")
    assert "no such luck" in caught.value.tail
    assert supervisor.pids == {"one": first}
    assert alive(first)
    await supervisor.stop([])


async def test_a_stop_in_the_middle_of_a_restart_leaves_nobody(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    code = f"import os, time\nif os.path.exists({str(slow)!r}): time.sleep(60)\n{READY}{WAIT}"
    supervisor = Supervisor(lambda line: None)
    await supervisor.start([spec(tmp_path, "one", code)])
    slow.touch()
    replacing = asyncio.create_task(supervisor.replace("one"))
    await until(lambda: len(children(tmp_path)) == 2)
    pids = children(tmp_path)
    replacing.cancel()
    await asyncio.gather(replacing, return_exceptions=True)
    await supervisor.stop([])
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_a_child_that_dies_while_its_successor_starts_is_not_left_twice(tmp_path: Path) -> None:
    code = f"import time\ntime.sleep(0.8)\n{READY}{WAIT}"
    supervisor = Supervisor(lambda line: None)
    await supervisor.start([spec(tmp_path, "one", code)])
    watching = asyncio.create_task(supervisor.watch())
    replacing = asyncio.create_task(supervisor.replace("one"))
    await asyncio.sleep(0.2)
    os.kill(supervisor.pids["one"], 9)
    await replacing
    await asyncio.sleep(1.5)
    assert len(supervisor.pids) == 1
    assert children(tmp_path) == list(supervisor.pids.values())
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([])


async def test_a_stop_in_the_middle_of_a_stop_does_not_hurry_it_and_keeps_the_order(tmp_path: Path) -> None:
    # Given a child that needs a while to stop and ends at once at a second signal, like our services, and a server
    note, first = tmp_path / "note", tmp_path / "first"
    code = (
        "import os, signal, time\n"
        f"takes_s = 0 if os.path.exists({str(first)!r}) else 2\nopen({str(first)!r}, 'w')\n"
        f"def say(word): os.write(os.open({str(note)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), word)\n"
        "def end(*_):\n signal.signal(signal.SIGTERM, lambda *_: (say(b'cut '), os._exit(1)))\n"
        " say(b'begun '); time.sleep(takes_s); say(b'finished '); os._exit(0)\n"
        f"signal.signal(signal.SIGTERM, end)\n{READY}time.sleep(60)\n"
    )
    server = (
        f"import os, signal, time\n"
        f"def end(*_): os.write(os.open({str(note)!r}, os.O_WRONLY | os.O_APPEND), b'server '); os._exit(0)\n"
        f"signal.signal(signal.SIGTERM, end)\n{READY}time.sleep(60)\n"
    )
    supervisor = Supervisor(lambda line: None)
    await supervisor.start([spec(tmp_path, "one", code), spec(tmp_path, "server", server)])
    # When the stack is stopped while a restart stops the first of the two
    replacing = asyncio.create_task(supervisor.replace("one"))
    await until(lambda: note.exists() and "begun" in note.read_text())
    replacing.cancel()
    await asyncio.gather(replacing, return_exceptions=True)
    await supervisor.stop([["one"], ["server"]])
    # Then predecessor and successor finished in peace, and the server that they need stopped after both
    said = note.read_text().split()
    assert sorted(said) == ["begun", "begun", "finished", "finished", "server"]
    assert said[-1] == "server"


async def test_a_successor_is_watched_while_its_predecessor_stops(tmp_path: Path) -> None:
    # Given a predecessor that takes its time to stop
    said: list[str] = []
    supervisor = Supervisor(said.append)
    await supervisor.start([spec(tmp_path, "one", stopping_in(4), stop_timeout_s=20.0)])
    watching = asyncio.create_task(supervisor.watch())
    first = supervisor.pids["one"]
    replacing = asyncio.create_task(supervisor.replace("one"))
    await until(lambda: supervisor.pids["one"] != first)
    # When its successor is killed meanwhile
    second = supervisor.pids["one"]
    os.kill(second, 9)
    # Then there is another before the predecessor has ended
    await until(lambda: supervisor.pids["one"] != second)
    assert not replacing.done()
    assert "one was killed by SIGKILL" in said[0]
    await replacing
    await until(lambda: "one is back" in said)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    supervisor.kill()
    await supervisor.stop([])
    assert children(tmp_path) == []


async def test_what_dies_while_its_successor_starts_is_not_started_besides(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"import time\nopen({str(starts)!r}, 'a').write('x')\ntime.sleep(1)\n{READY}{WAIT}"
    supervisor = Supervisor(lambda line: None)
    await supervisor.start([spec(tmp_path, "one", code)])
    watching = asyncio.create_task(supervisor.watch())
    replacing = asyncio.create_task(supervisor.replace("one"))
    await until(lambda: starts.read_text() == "xx")
    os.kill(supervisor.pids["one"], 9)
    await replacing
    assert starts.read_text() == "xx"
    assert children(tmp_path) == list(supervisor.pids.values())
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([])


async def test_a_failed_successor_does_not_take_its_predecessors_ready_file(tmp_path: Path) -> None:
    # Given a child whose successor will tell why it can't start
    switch = tmp_path / "fail"
    fail = "from shared.lifecycle.ready import report_failed\nreport_failed('the model is gone')\nexit(2)\n"
    code = f"import os\nif os.path.exists({str(switch)!r}):\n " + fail.replace("\n", "\n ") + f"\n{READY}{WAIT}"
    supervisor = Supervisor(lambda line: None)
    await supervisor.start([spec(tmp_path, "one", code)])
    ready = tmp_path / "one.ready"
    before = ready.read_bytes()
    switch.touch()
    # When it is replaced
    with pytest.raises(ChildFailed, match="cannot start: the model is gone"):
        await supervisor.replace("one")
    # Then the ready file speaks of the one that goes on
    assert ready.read_bytes() == before
    assert json.loads(before)["pid"] == supervisor.pids["one"]
    # And a later attempt that succeeds is not taken for the failure
    switch.unlink()
    await supervisor.replace("one")
    await supervisor.stop([])


async def test_a_program_that_is_gone_is_a_failure_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.supervisor.FIRST_PAUSE_S", 0.001)
    supervisor = Supervisor(lambda line: None)
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    one = spec(tmp_path, "one", READY + WAIT)
    await supervisor.start([replace(one, command=(str(program), *one.command[1:]))])
    program.unlink()
    with pytest.raises(ChildFailed, match="one cannot be started"):
        await supervisor.replace("one")
    assert alive(supervisor.pids["one"])
    os.kill(supervisor.pids["one"], 9)
    with pytest.raises(ChildFailed, match="times in a row"):
        await supervisor.watch()
    await supervisor.stop([])


def children(folder: Path) -> list[int]:
    """Living processes that were started with a ready file in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"BATON_READY_FILE={folder}".encode() in (process / "environ").read_bytes() and alive(int(process.name)):
                found.append(int(process.name))
    return found


async def test_bounce_stops_first(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    take = f"import fcntl\nheld = open({str(lock)!r}, 'w')\nfcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    code = f"{take}{READY}{WAIT}"
    said: list[str] = []
    supervisor = Supervisor(said.append)
    await supervisor.start([spec(tmp_path, "one", code)])
    watching = asyncio.create_task(supervisor.watch())
    first = supervisor.pids["one"]
    await supervisor.bounce("one")
    assert supervisor.pids["one"] != first
    assert said == []
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([])


# ------------------------------------------------------------------------------------------ the door


def ask(folder: Path, message: Mapping[str, Any]) -> tuple[list[str], str]:
    said: list[str] = []
    try:
        control.order(folder, message, said.append)
    except (InvalidInput, Unavailable) as exc:
        return said, exc.message
    return said, ""


async def test_orders_are_answered_line_by_line(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()

    async def handler(message: Mapping[str, Any], say: Callable[[str], None]) -> None:
        say("begun")
        await asyncio.sleep(0.01)
        if message.get("fail") == "child":
            raise ChildFailed("policy", "was not ready", "the last line of its log")
        if message.get("fail") == "fault":
            raise ValueError("a fault of ours")
        if message.get("fail"):
            raise InvalidInput("no such thing")
        say("ended")

    async with control.serve_control(folder, handler):
        assert stat.S_IMODE((folder / control.NAME).stat().st_mode) == 0o600
        assert await asyncio.to_thread(ask, folder, {}) == (["begun", "ended"], "")
        assert await asyncio.to_thread(ask, folder, {"fail": "this"}) == (["begun"], "no such thing")
        _, told = await asyncio.to_thread(ask, folder, {"fail": "child"})
        assert told == "policy was not ready\n\nthe last line of its log"
        _, told = await asyncio.to_thread(ask, folder, {"fail": "fault"})
        assert told == "the order failed: ValueError('a fault of ours')"
    assert not (folder / control.NAME).exists()
    assert "does not listen" in ask(folder, {})[1]


@pytest.mark.parametrize("rubbish", [b"{\n", b"[]\n", b"\xff\n", b"x" * (control.MAX_ORDER_BYTES + 10)])
async def test_rubbish_is_refused_and_harms_nobody(tmp_path: Path, rubbish: bytes) -> None:
    handled: list[Mapping[str, Any]] = []

    async def handler(message: Mapping[str, Any], say: Callable[[str], None]) -> None:
        handled.append(message)

    def send() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / control.NAME))
            connection.sendall(rubbish)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()

    async with control.serve_control(tmp_path, handler):
        assert b'"error"' in await asyncio.to_thread(send)
        assert handled == []
        assert await asyncio.to_thread(ask, tmp_path, {"restart": []}) == ([], "")


async def test_the_supervisor_knows_one_order() -> None:
    handler = restart.handler(Supervisor(lambda line: None), INSTANCES, [])
    for message in ({}, {"restart": "policy"}, {"restart": [1]}, {"restart": [], "more": 1}, {"stop": ["policy"]}):
        with pytest.raises(InvalidInput, match="the orders are"):
            await handler(message, lambda line: None)
    with pytest.raises(InvalidInput, match="there is no 'nats' here"):
        await handler({"restart": ["nats"]}, lambda line: None)
