"""The environment of an installation: `.venv` with exact pins, made on first use. Standard library only.

    .venv                      the environment; `.venv/baton.json` says what it was made from
    .baton/setup.lock          one set-up at a time

A set-up that was interrupted leaves a mark, and the next one starts over. When only pins change, the environment is
brought up to date in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MACHINES = ("x86_64", "aarch64")
GPU_VARIABLE = "BATON_EXTRAS"
PATH_VARIABLE = "BATON_PYTHONPATH"
"""More folders that every process imports from, behind ours, such as a profiler's with a `sitecustomize`.

Absolute ones: any other would stand for the folder where the user happens to be.
"""
EXIT_SETUP = 3
HEARTBEAT_S = 15.0


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What an environment must hold: `pins` are requirement files in order, `torch` the build of PyTorch."""

    pins: tuple[Path, ...]
    torch: str  # cpu | gpu

    def digest(self, root: Path = ROOT) -> str:
        """Changes whenever an environment made earlier would no longer do."""
        state = hashlib.sha256(f"{TORCH} {self.torch} {sys.version_info[:2]} {home(root)}".encode())
        for path in self.pins:
            state.update(path.read_bytes())
        return state.hexdigest()


def home(root: Path) -> Path:
    """The folder in which the environment of `root` lies: another one where `.venv` is a link into that."""
    return (root / ".venv").resolve().parent


def wishes(root: Path, with_tests: bool, extras: str) -> Wish:
    """The wish of a command: tests need their own pins as well."""
    names = ("runtime.txt", "test.txt") if with_tests else ("runtime.txt",)
    return Wish(tuple(root / "requirements" / name for name in names), "gpu" if "gpu" in extras.split(",") else "cpu")


def main(argv: Sequence[str]) -> int:
    """Make sure of the environment, then become `python -m services.cli argv` in it. Returns only on failure."""
    from services.cli.__main__ import COMMANDS, refuse

    if not argv or argv[0] not in COMMANDS:
        return refuse(argv)
    if argv[0] == "doctor" and not satisfied(wishes(ROOT, False, os.environ.get(GPU_VARIABLE, "")), ROOT):
        # It changes nothing, so it does not set up either: it tells what a set-up would meet.
        from services.cli.doctor import main as doctor

        return doctor(argv[1:])
    try:
        tests = argv[0] == "test" and not {"-h", "--help"} & set(argv)
        python = ensure(wishes(ROOT, tests, os.environ.get(GPU_VARIABLE, "")), ROOT)
    except SetupError as exc:
        print(f"baton: {exc}", file=sys.stderr)
        return EXIT_SETUP
    except KeyboardInterrupt:
        print("\nbaton: set-up interrupted; the next start begins it anew", file=sys.stderr)
        return 130
    # what else the user has on PYTHONPATH is meant for another Python
    os.environ["PYTHONPATH"] = import_path(os.environ.get(PATH_VARIABLE, ""))
    # -P: a folder named `services` where the user happens to be must not win over ours.
    return os.execv(python, [str(python), "-P", "-m", "services.cli", *argv])


def import_path(more: str) -> str:
    """Our `PYTHONPATH`; `more` is as the user gave it under `PATH_VARIABLE`."""
    return os.pathsep.join((str(ROOT), *filter(os.path.isabs, more.split(os.pathsep))))


def ensure(wish: Wish, root: Path, say: Callable[[str], None] | None = None) -> Path:
    """The environment's Python, made or brought up to date if needed. Raises SetupError."""
    python = root / ".venv" / "bin" / "python"
    if satisfied(wish, root):
        return python
    say = say or (lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    check_machine(sys.platform, platform.machine())
    check_modules(lambda name: importlib.util.find_spec(name) is not None)
    with setup_lock(home(root), say):
        # Another start may have made it while this one waited.
        if not satisfied(wish, root):
            _make(wish, root, say)
    return python


def satisfied(wish: Wish, root: Path) -> bool:
    """True if the environment holds what is wished for, or more."""
    try:
        made = json.loads((root / ".venv" / "baton.json").read_text())
        return wish.digest(root) in made["digests"] and os.access(root / ".venv" / "bin" / "python", os.X_OK)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_machine(system: str, machine: str) -> None:
    """Raises SetupError on anything but Linux on x86-64 or arm64."""
    if system != "linux" or machine not in MACHINES:
        raise SetupError(f"runs on Linux on x86-64 or arm64; this is {system} on {machine}")


def check_modules(exists: Callable[[str], bool]) -> None:
    """Raises SetupError when this Python cannot make environments, as Debian's without an extra package."""
    for name in ("venv", "ensurepip"):
        if not exists(name):
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise SetupError(
                f"this Python has no {name} module; on Debian or Ubuntu: apt-get install python{version}-venv"
            )


@contextmanager
def setup_lock(root: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the set-up lock; the kernel gives it back even when this process is killed. Raises SetupError."""
    try:
        (root / ".baton").mkdir(exist_ok=True)
        file = (root / ".baton" / "setup.lock").open("a+")
    except OSError as exc:
        raise SetupError(f"cannot write to {root}: {exc.strerror}; clone Baton into a folder of your own") from exc
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another ./baton is setting up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(wish: Wish, root: Path, say: Callable[[str], None]) -> None:
    venv, started = root / ".venv", time.monotonic()
    building = venv / "baton.building"
    made = _made_from(venv)
    if venv.exists() and (building.exists() or not made["usable"]):
        say("removing an environment that is unfinished or of another Python")
        shutil.rmtree(venv, ignore_errors=True)
        made = _made_from(venv)
    say(f"setting up {venv} (once; about 250 MB to download)")
    if not (venv / "bin" / "python").exists():
        _run([_base_python(), "-m", "venv", str(venv)], "making the environment")
    try:
        building.touch()
        _install(wish, venv, say)
        digests = [wish.digest(root)]
        if len(wish.pins) > 1:
            # The test pins come on top of the runtime's, so this environment serves both.
            digests.append(Wish(wish.pins[:1], wish.torch).digest(root))
        text = json.dumps({"digests": digests, "python": _python_version(), "root": str(home(root))})
        (venv / "baton.json.new").write_text(text)
        (venv / "baton.json.new").replace(venv / "baton.json")
        building.unlink()
    except OSError as exc:
        raise SetupError(f"cannot write to {venv}: {exc.strerror}") from exc
    say(f"environment ready in {time.monotonic() - started:.0f} s")


def _made_from(venv: Path) -> dict[str, bool]:
    """Whether an existing environment can be brought up to date in place: same Python, same place."""
    try:
        lines = (venv / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return {"usable": False}
    version = next((line.partition("=")[2].strip() for line in lines if line.startswith("version")), "")
    same_python = version.split(".")[:2] == _python_version().split(".")[:2]
    try:
        told = json.loads((venv / "baton.json").read_text())["root"]
        same_place = home(Path(told)) == venv.resolve().parent
    except (OSError, ValueError, KeyError, TypeError):
        same_place = True
    return {"usable": same_python and same_place and (venv / "bin" / "python").exists()}


def _install(wish: Wish, venv: Path, say: Callable[[str], None]) -> None:
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--no-input"]
    if wish.torch == "gpu":
        say(f"1 of 3  PyTorch {TORCH} with CUDA (several GB)")
        _run([*pip, f"torch=={TORCH}"], "installing PyTorch")
    else:
        say(f"1 of 3  PyTorch {TORCH} for the CPU")
        # Its own requirements are among the pins.
        torch = [*pip, "--no-deps", f"torch=={TORCH}+cpu"]
        try:
            _run(torch, "installing PyTorch")
        except SetupError as exc:
            if exc.__cause__ is not None:
                raise
            _run([*torch, "--index-url", TORCH_CPU_INDEX], "installing PyTorch")
    count = sum(line.strip() != "" and not line.startswith("#") for path in wish.pins for line in _lines(path))
    say(f"2 of 3  {count} packages")
    _run([*pip, *(part for path in wish.pins for part in ("-r", str(path)))], "installing packages")
    say("3 of 3  checking")
    _run([str(venv / "bin" / "python"), "-m", "pip", "check"], "checking the environment")


def _run(command: list[str], doing: str) -> None:
    """Run one step. Raises SetupError; one with a cause is final, one without may succeed from another index."""
    try:
        code, text = _call(command, doing)
    except OSError as exc:
        raise SetupError(f"{doing} failed: {exc}") from exc
    if code == 0:
        return
    error = SetupError(explain(doing, text))
    if "No matching distribution found" not in text or offline(text):
        raise error from RuntimeError(text[-500:])
    raise error


def _call(command: list[str], doing: str) -> tuple[int, str]:
    """Exit code and output of a command; says now and then that it is still at it."""
    started = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                print(f"          {doing}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            else:
                return process.returncode, output


def explain(doing: str, output: str) -> str:
    """One sentence for a failed step, from its output. Pure."""
    if "No space left on device" in output or "[Errno 28]" in output:
        return f"{doing} failed: the disk is full; free about 2 GB and run it again"
    if offline(output):
        return (
            f"{doing} failed: no package could be downloaded; connect to the internet, or configure pip for a mirror "
            "(pip config set global.index-url URL), and run it again"
        )
    if "No matching distribution found" in output:
        wanted = output.partition("No matching distribution found for ")[2].splitlines()[0].strip()
        version = _python_version()
        return f"{doing} failed: {wanted} is not offered for Python {version} on {platform.machine()}"
    lines = [line for line in output.splitlines() if line.strip()]
    return f"{doing} failed:\n" + "\n".join(f"    {line}" for line in lines[-12:])


def offline(output: str) -> bool:
    """True if the output of pip tells of a network that does not answer."""
    signs = ("NewConnectionError", "Temporary failure in name resolution", "Network is unreachable", "ProxyError")
    return any(sign in output for sign in (*signs, "ConnectTimeoutError", "Failed to establish a new connection"))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _base_python() -> str:
    """The Python an environment is made from, also when this one runs inside an environment."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _python_version() -> str:
    return platform.python_version()
