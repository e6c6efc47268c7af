"""`./baton doctor`: what is missing or wrong on this machine, and the fix.

Standard library only until the environment is known to be there, so that it can speak about a machine on which nothing
can be set up yet. Each check is a small function that looks and judges; it changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from services.cli import cores, environment

OK, WARN, FAIL, SKIP = "ok", "warn", "FAIL", "-"
GIB = 1024**3
DISK_BYTES = 3 * GIB
"""What the environment and the default model take, with room to download."""
MEMORY_BYTES = 2 * GIB
FILES = 1024
OWN_CLONE = "clone Baton into a folder of your own, or run it as the owner of this one"
PORT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is empty when nothing has to be done."""

    check: str
    verdict: str
    detail: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when a stack could not start here."""
    parser = argparse.ArgumentParser(prog="baton doctor", description="Say what is missing or wrong, and the fix.")
    parser.add_argument("--config", metavar="FILE", help="settings file (default baton.toml)")
    parser.add_argument("--json", action="store_true", help="one JSON line a check")
    options = parser.parse_args(argv)
    failed = False
    for finding in examine(dict(os.environ), options.config):
        failed |= finding.verdict == FAIL
        print(json.dumps(asdict(finding)) if options.json else "\n".join(lines(finding)), flush=True)
    if not options.json:
        print("\nsomething is missing: see FAIL above" if failed else "\n./baton up can start here")
    return int(failed)


def lines(finding: Finding) -> list[str]:
    """A finding for people. Pure."""
    found = [f"{finding.verdict:<5}{finding.check:<14}{finding.detail}"]
    return [*found, f"{'':<19}fix: {finding.fix}"] if finding.fix else found


def examine(env: Mapping[str, str], config: str | None = None) -> Iterator[Finding]:
    """Every check in turn. What needs the environment is left out while that is not made."""
    yield machine(sys.platform, platform.machine())
    yield python(sys.version_info[:2], lambda name: importlib.util.find_spec(name) is not None)
    made = environment_made(environment.ROOT)
    yield made
    yield disk(environment.ROOT, shutil.disk_usage(environment.ROOT).free, made.verdict == OK)
    yield memory(cores.free_memory_bytes())
    yield processors(cores.usable_cores(), _cpu_flags())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield shared_memory(Path("/dev/shm"))
    yield compose(shutil.which("docker"), _runs)
    if made.verdict == OK and importlib.util.find_spec("pydantic") is not None:
        from services.cli.doctor_stack import examine_stack

        yield from examine_stack(env, config)
    else:
        yield Finding("settings", SKIP, "looked at once the environment is there")


def machine(system: str, kind: str) -> Finding:
    """Operating system and processor family."""
    try:
        environment.check_machine(system, kind)
    except environment.SetupError as exc:
        return Finding("machine", FAIL, str(exc), "use a Linux machine or container on x86-64 or arm64")
    return Finding("machine", OK, f"{system} on {kind}")


def python(version: tuple[int, ...], exists: Callable[[str], bool]) -> Finding:
    """This Python, and whether it can make environments."""
    words = ".".join(map(str, version))
    try:
        environment.check_modules(exists)
    except environment.SetupError as exc:
        reason, _, fix = str(exc).partition("; ")
        return Finding("python", FAIL, f"{words}: {reason}", fix)
    return Finding("python", OK, words)


def environment_made(root: Path) -> Finding:
    """Is `.venv` there, with these pins?"""
    wish = environment.wishes(root, with_tests=False, extras=os.environ.get(environment.GPU_VARIABLE, ""))
    if environment.satisfied(wish, root):
        return Finding("environment", OK, str(root / ".venv"))
    what = "is of other pins or unfinished" if (root / ".venv").exists() else "is not made yet"
    if not os.access(root, os.W_OK):
        return Finding("environment", FAIL, f"{root / '.venv'} {what}, and {root} is not writable", OWN_CLONE)
    return Finding("environment", WARN, f"{root / '.venv'} {what}", "none needed: the next ./baton up makes it")


def disk(folder: Path, free: int, made: bool) -> Finding:
    """Room for the environment and the model."""
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if free >= DISK_BYTES or (made and free >= DISK_BYTES // 6):
        return Finding("disk", OK, text)
    return Finding("disk", FAIL, text, f"free {DISK_BYTES / GIB:.0f} GiB, or put the folder elsewhere")


def memory(free: int) -> Finding:
    """Memory for the services, one prefill and one decode worker."""
    text = f"{free / GIB:.1f} GiB free"
    if free >= MEMORY_BYTES:
        return Finding("memory", OK, text)
    return Finding("memory", FAIL, text, f"the default stack wants {MEMORY_BYTES / GIB:.0f} GiB; end something large")


def processors(count: int, flags: frozenset[str]) -> Finding:
    """Cores, and the instructions that decide how fast they are."""
    known = [name for name in ("avx512f", "avx512_bf16", "avx512_vnni", "avx2", "asimd") if name in flags]
    text = f"{count} core(s){': ' + ', '.join(known) if known else ''}"
    if count < 2:
        return Finding("cores", WARN, text, "prefill and decode share the one core; give it two or more")
    if flags and "avx2" not in flags and "asimd" not in flags:
        return Finding("cores", WARN, text, "no AVX2: it runs, slowly")
    return Finding("cores", OK, text)


def open_files(hard_limit: int) -> Finding:
    """Descriptors the gateway may open: one a client, and a few of its own."""
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= FILES:
        return Finding("open files", OK, "no limit" if hard_limit == resource.RLIM_INFINITY else str(hard_limit))
    return Finding("open files", WARN, str(hard_limit), f"ulimit -n {FILES} or more, for many clients at once")


def shared_memory(folder: Path) -> Finding:
    """Where KV pools lie: memory that several processes map."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("shared memory", WARN, f"{folder} is not writable", "pools go to the state folder, on disk")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    least = 2 * cores.MIN_POOL_BYTES
    if free < least:
        return Finding("shared memory", FAIL, text, "enlarge it (docker run --shm-size 1g), or set kv.dir")
    return Finding("shared memory", OK, text)


def compose(docker: str | None, runs: Callable[[Sequence[str]], bool]) -> Finding:
    """Docker, which only the container stack needs."""
    if docker is None:
        return Finding("docker", SKIP, "not installed; only `docker compose up` needs it")
    if not runs([docker, "compose", "version"]):
        return Finding("docker", WARN, f"{docker} has no compose plugin", "install it for `docker compose up`")
    if not runs([docker, "info"]):
        return Finding("docker", WARN, "no engine answers", "start it for `docker compose up`, or check your rights")
    return Finding("docker", OK, docker)


def port_free(host: str, port: int) -> str:
    """Why the port cannot be listened on; empty when it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return exc.strerror or str(exc)
    return ""


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PORT_TIMEOUT_S * 5, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
