"""Supervision of real child processes: start, death, restart, stop, and nothing left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.child import ChildFailed, ChildSpec, describe_exit, tail
from services.cli.cores import pool_bytes_per_worker, threads_per_worker
from services.cli.credentials import ensure_credentials
from services.cli.servers import NATS_CORES, nats_cores, nats_spec, on_port, redis_spec
from services.cli.state import StackRecord, StateFolder, running_stack
from services.cli.supervisor import Supervisor, restart_pause_s
from services.cli.topology import StackPlan, instance_names, ready_file, service_spec, stop_limit_s, stop_order
from shared.bus.nats_connection import connect_bus
from shared.contracts.errors import Conflict, SettingsError, Unavailable
from shared.settings.load import ROOT, load_settings
from shared.settings.sections import Settings
from shared.store.redis_store import connect_redis
from shared.store.secrets import read_secret_text

READY = "from shared.lifecycle.ready import report_ready; report_ready(port=7)\n"
WAIT = "import time, signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\ntime.sleep(60)\n"


def stopping_in(seconds: float) -> str:
    """Code of a child that is ready, and takes so long to stop. A signal may come as soon as it is ready."""
    end = f"lambda *_: (time.sleep({seconds}), exit(0))"
    return f"import time, signal\nsignal.signal(signal.SIGTERM, {end})\n{READY}time.sleep(60)\n"


def spec(folder: Path, name: str, code: str, **changes: object) -> ChildSpec:
    ready = folder / f"{name}.ready"
    env = {**os.environ, "BATON_READY_FILE": str(ready), "PYTHONPATH": str(ROOT)}
    values = {
        "name": name,
        "command": (sys.executable, "-c", code),
        "env": env,
        "folder": folder,
        "log": folder / f"{name}.log",
        "ready": ready_file(ready),
        "start_timeout_s": 20.0,
        "stop_timeout_s": 5.0,
    }
    return ChildSpec(**{**values, **changes})  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until(condition: object, timeout_s: float = 10.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_children_start_side_by_side_and_stop_in_order(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda line: None)
    facts = await supervisor.start([spec(tmp_path, "a", stopping_in(0.5)), spec(tmp_path, "b", READY + WAIT)])
    assert facts["a"]["port"] == 7
    pids = supervisor.pids
    stopping = asyncio.create_task(supervisor.stop([["a"], ["b"]]))
    while alive(pids["a"]):
        assert alive(pids["b"])
        await asyncio.sleep(0.02)
    await stopping
    assert not any(alive(pid) for pid in pids.values())


async def test_a_child_that_dies_at_start_shows_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda line: None)
    with pytest.raises(ChildFailed) as caught:
        await supervisor.start(
            [spec(tmp_path, "good", READY + WAIT), spec(tmp_path, "bad", "import sys; sys.exit('no such model')")]
        )
    assert caught.value.name == "bad"
    assert "exit code 1" in caught.value.reason
    assert "no such model" in caught.value.tail
    pids = supervisor.pids
    await supervisor.stop([])
    assert not alive(pids["good"])


async def test_a_child_that_is_never_ready_is_told(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda line: None)
    with pytest.raises(ChildFailed, match=r"late was not ready within 0\.2 s"):
        await supervisor.start([spec(tmp_path, "late", WAIT, start_timeout_s=0.2)])
    await supervisor.stop([])


async def test_a_killed_child_comes_back(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    await supervisor.start([spec(tmp_path, "a", READY + WAIT)])
    watching = asyncio.create_task(supervisor.watch())
    first = supervisor.pids["a"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: "a is back" in lines)
    assert supervisor.pids["a"] != first
    assert "a was killed by SIGKILL; starting it again" in lines[0]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([])


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.supervisor.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("services.cli.supervisor.MAX_FAILURES", 3)
    supervisor = Supervisor(lambda line: None)
    mark = tmp_path / "once"
    code = f"import os, sys\nif os.path.exists({str(mark)!r}): sys.exit('broken')\nopen({str(mark)!r}, 'w')\n"
    await supervisor.start([spec(tmp_path, "a", code + READY + WAIT)])
    os.kill(supervisor.pids["a"], signal.SIGKILL)
    with pytest.raises(ChildFailed, match="3 times in a row") as caught:
        await supervisor.watch()
    assert "broken" in caught.value.tail
    await supervisor.stop([])


async def test_a_child_that_is_killed_again_and_again_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.supervisor.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("services.cli.supervisor.MAX_FAILURES", 2)
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    await supervisor.start([spec(tmp_path, "a", READY + WAIT)])
    watching = asyncio.create_task(supervisor.watch())
    for count in (1, 2, 3):
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda count=count: lines.count("a is back") == count, 30)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([])


async def test_a_child_that_will_not_stop_is_killed_with_what_it_started(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    grandchild = tmp_path / "pid"
    stubborn = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(grandchild)!r}, 'w').write(str(p.pid))\n" + READY + "time.sleep(60)\n"
    )
    await supervisor.start([spec(tmp_path, "a", stubborn, stop_timeout_s=0.2)])
    await supervisor.stop([])
    assert lines == ["a did not stop within 0.2 s and was killed"]
    await until(lambda: not alive(int(grandchild.read_text())))


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from tests.unit.test_supervisor import READY, WAIT, spec
from services.cli.supervisor import Supervisor
async def main():
    s = Supervisor(print)
    await s.start([spec(Path({str(tmp_path)!r}), "a", READY + WAIT)])
    print(s.pids["a"], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def test_nats_gets_a_part_of_the_cores_or_what_it_is_told(tmp_path: Path) -> None:
    assert [nats_cores(cores) for cores in (1, 2, 4, 16, 64)] == [1, 1, 1, 4, 16]
    state = StateFolder(tmp_path / "state")
    credentials = ensure_credentials(state.secrets)
    assert nats_spec(state, credentials, {NATS_CORES: "3"}).env[NATS_CORES] == "3"
    assert int(nats_spec(state, credentials, {}).env[NATS_CORES]) == nats_cores(len(os.sched_getaffinity(0)))


async def test_the_bundled_servers_start_guarded_and_come_back_on_their_ports(tmp_path: Path) -> None:
    from services.cli.servers import free_port, redis_url

    state = StateFolder(tmp_path / "state")
    credentials = ensure_credentials(state.secrets)
    supervisor = Supervisor(lambda line: None)
    port = free_port()
    nats = nats_spec(state, credentials, os.environ)
    facts = await supervisor.start([nats, redis_spec(state, credentials, os.environ, port)])
    supervisor.respecify(on_port(nats, facts["nats"]["port"]))
    nats_password = read_secret_text(credentials.nats_password("scheduler"))
    redis_password = read_secret_text(credentials.redis_password)
    watching = asyncio.create_task(supervisor.watch())
    async with (
        connect_bus(facts["nats"]["url"], "scheduler", password=nats_password) as bus,
        connect_redis(redis_url(port), password=redis_password) as store,
    ):
        term = await bus.acquire_lease("pool", "me", 60)
        assert term
        await store.execute("SET", "kept", "yes")
        assert await store.script("return redis.call('GET', KEYS[1])", ["kept"], []) == b"yes"
        assert await store.transaction([("INCR", "n"), ("GET", "n")]) == [1, b"1"]
        assert abs(await store.now_s() - time.time()) < 5
        await asyncio.sleep(1.1)  # append-only file: on disk within a second
        before = supervisor.pids
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not bus.connected)
        await until(lambda: bus.connected)
        # The store survived: the lease is still ours, at the same term.
        assert await bus.acquire_lease("pool", "me", 60) == term
        assert await bus.acquire_lease("pool", "other", 60) is None
        await until(lambda: (state.logs / "redis.log").read_text().count("Ready to accept") == 2)
        with pytest.raises(Unavailable, match="redis"):
            await store.execute("GET", "kept")
        assert await store.execute("GET", "kept") == b"yes"
    with pytest.raises(SettingsError, match="password"):
        async with connect_redis(redis_url(port), password="wrong"):
            pass
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop([["nats"], ["redis"]])


def test_one_stack_a_state_folder(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "s")
    assert state.holder() is None
    lock = state.lock()
    assert state.holder() == os.getpid()
    with pytest.raises(Conflict, match=r"already runs.*\./baton down"):
        StateFolder(tmp_path / "s").lock()
    record = StackRecord("http://x", "k", "a", os.getpid())
    assert state.stop_limit_s() == 120
    state.write_stop_limit(stop_limit_s(load_settings({"gateway.shutdown_s": 300.5}).settings))
    assert state.stop_limit_s() == 421
    state.write_record(record)
    assert running_stack({"BATON_STATE": str(tmp_path / "s")}) == record
    lock.release()
    assert running_stack({"BATON_STATE": str(tmp_path / "s")}) is None
    state.clear_run()
    assert not state.record.exists()
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


def test_credentials_are_kept_and_private(tmp_path: Path) -> None:
    first = ensure_credentials(tmp_path)
    second = ensure_credentials(tmp_path)
    assert (first.api_key, first.admin_key) == (second.api_key, second.admin_key)
    assert first.api_key != first.admin_key
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert first.api_key not in first.bootstrap.read_text()


def plan(tmp_path: Path, **changes: object) -> StackPlan:
    settings = load_settings({"workers.decode": 2, "engine.threads": 3, "bus.nats_url": "nats://n"}).settings
    state = StateFolder(tmp_path)
    values = {"own_nats": True, "own_redis": True, **changes}
    return StackPlan(settings, state, ensure_credentials(state.secrets), **values)  # type: ignore[arg-type]


def test_each_process_is_told_its_own_secrets_only(tmp_path: Path) -> None:
    env = {"PATH": "/bin", "BATON_MASTER_KEY_FILE": "/foreign", "BATON_GATEWAY_PORT": "1", "NATS_URL": "nats://old"}
    decode = service_spec(plan(tmp_path), "decode-2", "decode", env)
    assert decode.command[-1] == "services.decode"
    assert decode.env["OMP_NUM_THREADS"] == "3"
    assert decode.env["BATON_NATS_PASSWORD_FILE"].endswith("/nats-decode")
    assert "BATON_MASTER_KEY_FILE" not in decode.env
    assert "NATS_URL" not in decode.env
    assert load_settings(env=decode.env).settings.bus.nats_url == "nats://n"
    shared = replace(plan(tmp_path), settings=load_settings({"workers.decode": 2}).settings, threads=5)
    assert service_spec(shared, "decode-2", "decode", env).env["OMP_NUM_THREADS"] == "5"
    policy = service_spec(plan(tmp_path), "policy", "policy", env)
    assert policy.env["BATON_MASTER_KEY_FILE"] == str(tmp_path / "secrets" / "master-key")
    assert policy.env["OMP_NUM_THREADS"] == "1"
    foreign = service_spec(plan(tmp_path, own_nats=False, own_redis=False), "policy", "policy", env)
    assert "BATON_NATS_PASSWORD_FILE" not in foreign.env
    assert "BATON_REDIS_PASSWORD_FILE" not in foreign.env


def test_every_process_stops_and_the_ingresses_stop_first(tmp_path: Path) -> None:
    settings = plan(tmp_path).settings
    order = stop_order(settings)
    assert order[0] == ["gateway", "batch"]
    assert order[-2:] == [["nats"], ["redis"]]
    assert sorted(name for group in order for name in group) == sorted([*instance_names(settings), "nats", "redis"])
    assert ["decode-1", "decode-2"] in order
    assert instance_names(Settings())["prefill-1"] == "prefill"


def test_shares() -> None:
    assert [threads_per_worker(cores, 2) for cores in (1, 2, 3, 8)] == [1, 1, 1, 4]
    mib = 1024 * 1024
    assert pool_bytes_per_worker(4096 * mib, 100_000 * mib, 2) == 512 * mib
    assert pool_bytes_per_worker(4096 * mib, 200 * mib, 2) == 80 * mib
    assert pool_bytes_per_worker(1 << 40, 1 << 40, 2) == 1024 * mib
    assert pool_bytes_per_worker(mib, mib, 2) == 64 * mib
    assert [restart_pause_s(n) for n in (1, 2, 3, 20, 100_000)] == [0.25, 0.5, 1.0, 15.0, 15.0]
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(2) == "ended with exit code 2"


def test_tail(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{n}\n" for n in range(100)))
    assert tail(tmp_path / "log", 3) == "97\n98\n99"
    assert tail(tmp_path / "none") == ""
