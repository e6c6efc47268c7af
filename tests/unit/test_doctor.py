"""`./baton doctor`: each fault is found and its fix named; a sound machine passes."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from kernels.native.build import source_digest
from kernels.native.compiler import find_compiler
from kernels.native.cpu import NEEDED, VARIABLE, machine_level
from services.cli import doctor, doctor_stack, environment
from services.cli.doctor import FAIL, GIB, OK, SKIP, WARN
from services.cli.state import StackRecord
from shared.contracts.errors import SettingsError
from shared.model.digest import model_digest
from shared.model.quality_gate import Configuration, Record, SetFigures, keep_record, own_results
from shared.settings.load import ROOT
from shared.settings.models import served_models
from shared.settings.sections import EngineSettings, GatewaySettings, ModelSettings, Settings
from tests.tiny_models import make_tiny_model


def test_machine_and_python() -> None:
    assert doctor.machine("linux", "x86_64").verdict == OK
    assert doctor.machine("darwin", "arm64").verdict == FAIL
    assert doctor.python((3, 11), lambda name: True).verdict == OK
    lacking = doctor.python((3, 11), lambda name: name != "ensurepip")
    assert lacking.verdict == FAIL
    assert "apt-get install" in lacking.detail + lacking.fix


def test_room_and_memory() -> None:
    folder = Path("/somewhere")
    assert doctor.disk(folder, 4 * GIB, made=False).verdict == OK
    assert doctor.disk(folder, 1 * GIB, made=False).verdict == FAIL
    assert doctor.disk(folder, 1 * GIB, made=True).verdict == OK
    assert doctor.memory(8 * GIB).verdict == OK
    assert "1.0 GiB free" in doctor.memory(GIB).detail
    assert doctor.memory(GIB).verdict == FAIL


def test_cores_and_limits() -> None:
    assert doctor.processors(8, frozenset({"avx2"})).verdict == OK
    assert doctor.processors(8, frozenset({"asimd"})).verdict == OK
    assert doctor.processors(1, frozenset({"avx2"})).verdict == WARN
    assert doctor.processors(8, frozenset({"sse2"})).verdict == WARN
    assert doctor.open_files(resource.RLIM_INFINITY).verdict == OK
    assert doctor.open_files(256).verdict == WARN


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared_memory(tmp_path).verdict == OK
    assert doctor.shared_memory(tmp_path / "none").verdict == WARN
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 64 * 2**20))  # type: ignore[attr-defined]
    small = doctor.shared_memory(tmp_path)
    assert small.verdict == FAIL
    assert "--shm-size" in small.fix


def test_docker_is_asked_for_what_the_container_stack_needs() -> None:
    assert doctor.compose(None, lambda command: True).verdict == SKIP
    assert "compose plugin" in doctor.compose("docker", lambda command: False).detail
    assert "no engine" in doctor.compose("docker", lambda command: "compose" in command).detail
    assert doctor.compose("docker", lambda command: True).verdict == OK


def test_an_environment_of_other_pins_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "runtime.txt").write_text("a==1\n")
    assert "is not made yet" in doctor.environment_made(tmp_path).detail
    (tmp_path / ".venv").mkdir()
    assert "other pins" in doctor.environment_made(tmp_path).detail


def test_servers(tmp_path: Path) -> None:
    def missing() -> Path:
        raise SettingsError("nats-server is not installed")

    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    sound = tmp_path / "sound"
    sound.write_text("#!/bin/sh\necho server 1.2\n")
    sound.chmod(0o755)
    given = doctor_stack.server("redis", "redis://:secret@host/0", "REDIS_URL", missing)
    assert given.verdict == OK
    assert "secret" not in given.detail
    assert doctor_stack.server("nats", "", "NATS_URL", missing).verdict == FAIL
    assert doctor_stack.server("nats", "", "NATS_URL", lambda: broken).verdict == FAIL
    assert doctor_stack.server("nats", "", "NATS_URL", lambda: sound).detail == "server 1.2"


def test_whether_the_native_kernels_can_be_had(tmp_path: Path) -> None:
    env = {"BATON_CACHE": str(tmp_path), "PATH": "", VARIABLE: "none"}
    found = doctor_stack.kernels(Settings(), env)
    assert (found.verdict, found.detail) == (WARN, NEEDED)
    assert doctor_stack.kernels(Settings(engine=EngineSettings(kernels="torch")), env).verdict == SKIP
    if (best := machine_level({})) is None:
        return
    del env[VARIABLE]
    if find_compiler(env, tmp_path / "kernels") is None:
        assert "zig" in doctor_stack.kernels(Settings(), env).fix
        kept = tmp_path / "kernels" / f"{source_digest()}-{best.name}-0.so"
        kept.parent.mkdir()
        kept.touch()
        found = doctor_stack.kernels(Settings(), env)
        assert (found.verdict, found.detail) == (OK, f"native, {best.name}, kept in {kept.parent}")
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho cc 1.2\n")
    compiler.chmod(0o755)
    found = doctor_stack.kernels(Settings(), {**env, "PATH": f"{tmp_path}:/bin"})
    assert (found.verdict, found.detail) == (OK, f"native, {best.name}, by cc 1.2")
    assert "BATON_CPU_LEVEL=sse" in doctor_stack.kernels(Settings(), {**env, VARIABLE: "sse"}).detail


def test_what_is_known_of_the_quality_of_what_would_compute(tmp_path: Path) -> None:
    folder, env = make_tiny_model(tmp_path / "tiny"), {"BATON_CACHE": str(tmp_path), VARIABLE: "none"}

    def found(dtype: Literal["auto", "bfloat16"], **engine: Any) -> doctor.Finding:
        settings = Settings(
            model=ModelSettings(path=str(folder), dtype=dtype), engine=EngineSettings(device="cpu", **engine)
        )
        return doctor_stack.quality(served_models(settings)[0], settings, env)

    assert (found("auto").verdict, found("auto").detail[:24]) == (OK, "float32 on torch kernels")
    asked = found("bfloat16")
    assert (asked.verdict, asked.detail) == (
        WARN,
        "bfloat16 on torch kernels: quality never measured for this model",
    )
    assert asked.fix == (
        f"./baton bench quality --model {folder} --kernels torch --dtype bfloat16 --quant none measures it"
    )
    for top1, verdict in ((0.99, OK), (0.5, WARN)):
        configuration = Configuration("torch", "bfloat16")
        sets = {"code": SetFigures(100, 0.001, top1)}
        keep_record(own_results(tmp_path), Record(model_digest(folder), "tiny", configuration, "n", sets))
        assert found("bfloat16").verdict == verdict
        assert found("auto").detail.startswith("bfloat16" if verdict == OK else "float32")
    assert found("auto", quant="int8").detail.startswith("int8 over float32 on native kernels")
    beyond = found("auto", quant="w8a8")
    assert (beyond.verdict, beyond.detail) == (SKIP, "quant 'w8a8' needs a GPU")
    (default,) = served_models(Settings())
    assert doctor_stack.quality(default, Settings(), {"BATON_CACHE": str(tmp_path)}).verdict == SKIP


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (given,) = served_models(Settings(model=ModelSettings(path=str(tmp_path))))
    found = doctor_stack.model(given, False, {})
    assert found.verdict == FAIL
    assert "config.json" in found.detail
    (default,) = served_models(Settings())
    assert doctor_stack.model(default, False, {"BATON_CACHE": str(tmp_path)}).verdict == WARN


def test_a_taken_port_is_a_fault_unless_it_is_ours() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        settings = Settings(gateway=GatewaySettings(port=number))
        found = doctor_stack.port(settings, None)
        assert found.verdict == FAIL
        assert "--port 0" in found.fix
        ours = StackRecord(f"http://127.0.0.1:{number}", "k", "a", 1)
        assert doctor_stack.port(settings, ours).verdict == OK
    assert doctor_stack.port(settings, None).verdict == OK


def test_a_stack_that_does_not_answer() -> None:
    assert doctor_stack.running(None).verdict == SKIP
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        assert doctor_stack.running(StackRecord(url, "k", "a", 1)).verdict == FAIL


def test_a_state_folder_that_cannot_be_made(tmp_path: Path) -> None:
    assert doctor_stack.state(tmp_path / "not" / "yet").verdict == OK
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        found = doctor_stack.state(path)
        assert (found.verdict, "BATON_STATE" in found.fix) == (FAIL, True)


def test_pools_of_killed_workers_are_reported(tmp_path: Path) -> None:
    assert doctor_stack.leftover_pools(tmp_path) is None
    (tmp_path / "baton-0-abc").mkdir()
    (tmp_path / "baton-0-abc" / "decode.kvpool").write_bytes(bytes(2**20))
    found = doctor_stack.leftover_pools(tmp_path)
    assert found is not None
    assert f"1 MiB: {tmp_path / 'baton-0-abc'}" in found.detail


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "BATON_STATE": str(tmp_path), "BATON_GATEWAY_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "doctor", "--json"],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == any(line["verdict"] == FAIL for line in found.values()), done.stderr
    assert {"machine", "python", "environment", "nats-server", "redis", "model", "port", "settings"} <= set(found)
    assert found["settings"]["verdict"] == OK
    assert all(line["fix"] for line in found.values() if line["verdict"] == FAIL)


def test_without_an_environment_it_speaks_and_sets_nothing_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "satisfied", lambda wish, root: False)
    monkeypatch.setattr(environment, "ensure", lambda *args: pytest.fail("doctor must not set up"))
    assert environment.main(["doctor"]) in (0, 1)
    assert "looked at once the environment is there" in capsys.readouterr().out
