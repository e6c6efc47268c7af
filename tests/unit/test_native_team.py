"""The thread team of the native kernels: more threads than cores, and threads that come late, change no result."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kernels.native.abi import TO_FLOATS
from kernels.native.arena import Arena
from kernels.native.build import KERNELS
from kernels.native.compiler import find_compiler
from kernels.native.library import Team
from kernels.native.packed import linear, pack_linear, packed_bytes
from tests.native import ALL_LEVELS, library_at, require_native, team_of

SOURCES = [str(Path(__file__).with_name("team_test.c")), str(KERNELS / "native" / "threads.c")]


def build(folder: Path, *flags: str) -> Path:
    compiler = find_compiler(os.environ)
    if compiler is None or os.uname().machine != "x86_64":
        pytest.skip("the native kernels need a C compiler and an x86-64 processor")
    target = folder / "team"
    command = [*compiler.command, "-std=gnu11", "-Wall", "-Werror", *flags, "-pthread", f"-I{KERNELS}", *SOURCES]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=120)
    return target


def run(program: Path, threads: int, runs: int) -> str:
    done = subprocess.run([program, str(threads), str(runs)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, (threads, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def test_every_item_runs_once_and_in_its_phase(tmp_path: Path) -> None:
    program = build(tmp_path, "-O2")
    # somebody else keeps a core busy meanwhile, so that threads are taken off theirs anywhere
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            for threads in (1, 2, 3, 16):
                assert run(program, threads, 300) == "ok\n"
        finally:
            other.kill()


@pytest.mark.long
def test_the_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    program = build(tmp_path, "-O1", "-g", "-fsanitize=thread")
    for threads in (2, 3, 8):
        assert run(program, threads, 100) == "ok\n"


def test_the_threads_in_use_change_no_bit() -> None:
    require_native()
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(300, 70, generator=draw), torch.randn(40, 70, generator=draw)
    team = Team(library_at(ALL_LEVELS[0]), 3)
    packed = pack_linear(team, Arena(packed_bytes(300, 70, torch.float32)), [weight], [], torch.float32)
    found = []
    for threads in (3, 1, 2, 0, 5, 3):
        team.use(threads)
        found.append(torch.full((40, 300), float("nan")))
        linear(team, x, packed, TO_FLOATS, found[-1])
    assert all(torch.equal(y, found[0]) for y in found)
    torch.testing.assert_close(found[0], x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_team_tells_the_processor_time_of_all_its_threads() -> None:
    require_native()
    team = team_of(ALL_LEVELS[0], 2)
    weight, x = torch.randn(1024, 512), torch.randn(64, 512)
    packed = pack_linear(team, Arena(packed_bytes(1024, 512, torch.float32)), [weight], [], torch.float32)
    y, before, own = torch.empty(64, 1024), team.cpu_s(), time.thread_time()
    until = time.monotonic() + 10
    while team.cpu_s() - before < 0.05 and time.monotonic() < until:
        linear(team, x, packed, TO_FLOATS, y)
    spent, own = team.cpu_s() - before, time.thread_time() - own
    assert spent >= 0.05
    if Path("/proc/self/schedstat").exists():
        assert spent > 0.5 * own  # in Python, this thread did little but call
