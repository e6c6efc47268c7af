"""Imports point one way: services → shared → kernels; control services stay light and start in about a second."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ("gateway", "batch", "policy", "scheduler", "prefix_cache_index")
HEAVY = ("torch", "transformers", "triton")
TOP = ("services", "shared", "kernels", "loadtest", "tests")


def imports(path: Path) -> Iterator[str]:
    """Dotted names a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@cache
def edges() -> tuple[tuple[Path, str], ...]:
    """(file, name it imports) of every file; parsing them all takes longer than any question asked of it."""
    files = (path for top in TOP for path in sorted((ROOT / top).rglob("*.py")))
    return tuple((path.relative_to(ROOT), name) for path in files for name in imports(path))


def test_imports_point_one_way() -> None:
    allowed = {
        "kernels": {"kernels"},
        "shared": {"shared", "kernels"},
        "services": {"services", "shared", "kernels"},
        "loadtest": {"loadtest", "services", "shared", "kernels"},
        "tests": set(TOP),
    }
    wrong = [
        f"{path} imports {name}"
        for path, name in edges()
        if name.split(".")[0] in TOP and name.split(".")[0] not in allowed[path.parts[0]]
    ]
    assert not wrong


def test_no_service_imports_another() -> None:
    wrong = []
    for path, name in edges():
        parts = name.split(".")
        if path.parts[0] == "services" and parts[0] == "services" and len(parts) > 1:
            owner = path.parts[1]
            if owner != "cli" and parts[1] != owner:
                wrong.append(f"{path} imports {name}")
    assert not wrong


def test_control_services_name_no_heavy_library() -> None:
    wrong = [
        f"{path} imports {name}"
        for path, name in edges()
        if path.parts[0] == "services" and path.parts[1] in LIGHT and name.split(".")[0] in HEAVY
    ]
    assert not wrong


@pytest.mark.parametrize("service", LIGHT)
def test_control_services_start_light(service: str) -> None:
    """The whole import graph of the entry point, in a fresh interpreter."""
    code = (
        "import importlib, sys\n"
        f"importlib.import_module('services.{service}.__main__')\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "sys.exit('imports ' + ', '.join(heavy) if heavy else 0)\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # A bound against accidents (a torch import takes several seconds), not a speed claim.
    assert time.perf_counter() - started < 20


def test_transformers_imports_from_the_root() -> None:
    """`kernels` is also the import name of a Hugging Face package; ours must not break theirs."""
    done = subprocess.run(
        [sys.executable, "-c", "import transformers; transformers.AutoModelForCausalLM"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_no_file_outgrows_one_sitting() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for top in ("services", "shared", "kernels", "loadtest")
        for path in sorted((ROOT / top).rglob("*.py"))
        if (lines := len(path.read_text().splitlines())) > 600
    ]
    assert not long
