"""The `baton` script: environment made once, plain errors, locks, and what `./baton test` runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.cli import environment
from services.cli.__main__ import COMMANDS, main
from services.cli.check import checks, compose_binary, pytest_command
from services.cli.environment import SetupError, Wish, ensure, explain, offline, satisfied, wishes
from shared.settings.load import ROOT
from shared.version import VERSION
from tests.skip_policy import allowed_reasons, is_allowed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "requirements").mkdir()
    for name in ("runtime", "test"):
        (tmp_path / "requirements" / f"{name}.txt").write_text(f"{name}==1\n")
    return tmp_path


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records what would be run; making an environment makes its python only."""
    ran: list[str] = []

    def run(command: list[str], doing: str) -> None:
        ran.append(" ".join(command))
        if "venv" in command:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)
            (folder / "pyvenv.cfg").write_text(f"version = {environment._python_version()}\n")

    monkeypatch.setattr(environment, "_run", run)
    return ran


def quiet(line: str) -> None: ...


def test_made_once_and_again_only_when_pins_change(root: Path, steps: list[str]) -> None:
    wish = wishes(root, with_tests=False, extras="")
    python = ensure(wish, root, quiet)
    assert python == root / ".venv" / "bin" / "python"
    assert "torch==2.13.0+cpu" in steps[1]
    assert steps[2].endswith(f"-r {root}/requirements/runtime.txt")
    count = len(steps)
    ensure(wish, root, quiet)
    assert len(steps) == count
    (root / "requirements" / "runtime.txt").write_text("runtime==2\n")
    ensure(wish, root, quiet)
    assert not any("venv" in step.split() for step in steps[count:])


def test_an_environment_with_tests_serves_both(root: Path, steps: list[str]) -> None:
    ensure(wishes(root, with_tests=True, extras=""), root, quiet)
    assert satisfied(wishes(root, with_tests=False, extras=""), root)
    assert not satisfied(wishes(root, with_tests=False, extras="gpu"), root)
    ensure(wishes(root, with_tests=False, extras="gpu"), root, quiet)
    assert any(step.endswith("torch==2.13.0") for step in steps)


def test_an_environment_that_is_a_link_is_another_folders_and_stays_as_it_is(root: Path, steps: list[str]) -> None:
    ensure(wishes(root, with_tests=True, extras=""), root, quiet)
    (root / ".venv" / "kept").touch()
    made = len(steps)
    beside = root / "beside"
    (beside / "requirements").mkdir(parents=True)
    for name in ("runtime.txt", "test.txt"):
        (beside / "requirements" / name).write_bytes((root / "requirements" / name).read_bytes())
    (beside / ".venv").symlink_to(root / ".venv")
    # the same pins ask for nothing, others are installed in place, and neither folder takes it from the other
    ensure(wishes(beside, with_tests=False, extras=""), beside, quiet)
    assert len(steps) == made
    (beside / "requirements" / "runtime.txt").write_text("runtime==2\n")
    ensure(wishes(beside, with_tests=False, extras=""), beside, quiet)
    ensure(wishes(root, with_tests=False, extras=""), root, quiet)
    assert (root / ".venv" / "kept").exists()


def test_an_interrupted_setup_starts_over(root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wish = wishes(root, with_tests=False, extras="")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "_install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure(wish, root, quiet)
    assert not satisfied(wish, root)
    (root / ".venv" / "half").touch()
    ensure(wish, root, quiet)
    assert not (root / ".venv" / "half").exists()
    assert satisfied(wish, root)


def test_two_starts_at_once_set_up_once(root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wish = wishes(root, with_tests=False, extras="")
    monkeypatch.setattr(environment, "_install", lambda *_: time.sleep(0.2))
    said: list[str] = []
    starts = [threading.Thread(target=ensure, args=(wish, root, said.append)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len([step for step in steps if "-m venv" in step]) == 1
    assert "another ./baton is setting up; waiting for it" in said


def test_another_place_is_asked_only_for_a_missing_version(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    outputs = ["ERROR: No matching distribution found for torch==2.13.0+cpu", ""]

    def fake(command: list[str], doing: str) -> tuple[int, str]:
        asked.append(command)
        text = outputs.pop(0) if outputs else ""
        return (1 if text else 0), text

    monkeypatch.setattr(environment, "_call", fake)
    environment._install(wishes(root, False, ""), tmp_path, quiet)
    assert asked[1][-2:] == ["--index-url", "https://download.pytorch.org/whl/cpu"]
    outputs[:] = ["NewConnectionError: Temporary failure in name resolution"]
    asked.clear()
    with pytest.raises(SetupError, match="connect to the internet"):
        environment._install(wishes(root, False, ""), tmp_path, quiet)
    assert len(asked) == 1


def test_plain_errors() -> None:
    assert "disk is full" in explain("x", "OSError: [Errno 28] No space left on device")
    assert "is not offered for Python" in explain("x", "No matching distribution found for a==1\n")
    assert explain("installing", "one\ntwo\n").endswith("one\n    two")
    assert offline("Network is unreachable")
    with pytest.raises(SetupError, match="this is darwin on arm64"):
        environment.check_machine("darwin", "arm64")
    with pytest.raises(SetupError, match="apt-get install"):
        environment.check_modules(lambda name: name != "ensurepip")
    environment.check_machine("linux", "aarch64")


def test_a_long_step_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "HEARTBEAT_S", 0.05)
    environment._run([sys.executable, "-c", "import time; time.sleep(0.2)"], "waiting")
    assert "waiting: 0 s" in capsys.readouterr().err


def test_a_real_failure_of_pip_is_one_sentence(root: Path) -> None:
    """The real pip, told to look nowhere."""
    command = [sys.executable, "-m", "pip", "install", "--no-index", "no-such-thing==1"]
    with pytest.raises(SetupError, match="no-such-thing==1 is not offered"):
        environment._run(command, "installing")


@pytest.mark.parametrize("given", ["", ":", ".", "here:there/", ":/a::b:/c d:"])
def test_nothing_is_imported_from_where_the_user_is(given: str) -> None:
    folders = environment.import_path(given).split(os.pathsep)
    assert folders == [str(ROOT), *(("/a", "/c d") if "/a" in given else ())]


def test_the_script_parses_on_old_pythons() -> None:
    source = (ROOT / "baton").read_text()
    ast.parse(source, feature_version=(3, 5))
    assert "f'" not in source
    assert 'f"' not in source
    assert os.access(ROOT / "baton", os.X_OK)


def test_the_script_helps_without_an_environment(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for argv, code in ((["--help"], 0), ([], 2), (["nonsense"], 2)):
        done = subprocess.run(
            [sys.executable, ROOT / "baton", *argv], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "up " in done.stdout + done.stderr
        assert all(name in done.stdout + done.stderr for name in COMMANDS)


def test_the_script_tells_its_version_without_an_environment(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for asked in ("--version", "-V", "version"):
        done = subprocess.run([sys.executable, ROOT / "baton", asked], env=env, capture_output=True, check=True)
        assert done.stdout.decode() == f"baton {VERSION}\n"


def test_a_second_start_is_quick(root: Path, steps: list[str]) -> None:
    """What stands between the shell and the command once the environment exists."""
    wish = Wish(tuple((ROOT / "requirements").glob("*.txt")), "cpu")
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (root / ".venv" / "baton.json").write_text(json.dumps({"digests": [wish.digest(root)]}))
    started = time.perf_counter()
    ensure(wish, root, quiet)
    assert time.perf_counter() - started < 0.1
    assert steps == []


def test_commands() -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert main(["nonsense"]) == 2


def test_what_baton_test_runs() -> None:
    names = [name for name, _ in checks()]
    assert names[:3] == ["ruff check", "ruff format", "mypy"]
    assert compose_binary() is not None
    assert pytest_command(["-k", "x"], long=False)[-4:] == ["-m", "not long", "-k", "x"]
    assert pytest_command([], long=True)[-1] == "pytest"
    assert pytest_command(["-m", "gpu"], long=False)[-2:] == ["-m", "gpu"]


def test_pins_are_exact_and_named_once() -> None:
    pins = [
        line for name in ("runtime", "test") for line in (ROOT / "requirements" / f"{name}.txt").read_text().split()
    ]
    assert all(line.count("==") == 1 for line in pins)
    names = [line.partition("==")[0].lower() for line in pins]
    assert sorted(names) == sorted(set(names))


def test_skip_policy() -> None:
    patterns = allowed_reasons("# comment\nno GPU*  # why\n\n")
    assert patterns == ["no GPU*"]
    assert is_allowed("Skipped: no GPU here", patterns)
    assert not is_allowed("Skipped: flaky", patterns)


def test_an_unlisted_skip_is_red_in_ci_only(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_one():\n    pytest.skip('felt like it')\n")
    for ci, code in (("true", 1), ("", 0)):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.skip_policy", "-c", "/dev/null", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout
