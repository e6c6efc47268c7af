"""A stack of its own for tests, driven through the `./baton` script like a user would, and what can be seen of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import OpenAI

from services.cli.state import StackRecord, StateFolder
from shared.settings.load import ROOT
from tests import answer_files

UP_S, DOWN_S, POLL_S = 150.0, 60.0, 0.1
MODEL = "smollm2-135m-instruct"
OTHER_KEY = "sk-other-tenants-key"

Found = TypeVar("Found")


def until(
    condition: Callable[[], Found | None], timeout_s: float = 30.0, what: Callable[[], object] = lambda: "it"
) -> Found:
    """Poll until `condition` gives something true, and return that. Fails after `timeout_s`, telling `what` lacked."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what()}"
        time.sleep(POLL_S)
    return found


@dataclass
class Baton:
    """The command line on one state folder, with a folder of its own for temporary files."""

    folder: Path
    more_env: dict[str, str] = field(default_factory=dict)
    record: StackRecord | None = None

    def __post_init__(self) -> None:
        self.temporary = self.folder.with_name(f"{self.folder.name}-tmp")
        self.temporary.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "NATS_", "REDIS_"))}
        own = {"BATON_STATE": str(self.folder), "TMPDIR": str(self.temporary)}
        self.env = kept | own | answer_files.environment() | self.more_env

    # ---------------------------------------------------------------------------------------- commands

    def command(self, *argv: str) -> list[str]:
        return [str(ROOT / "baton"), *argv]

    def run(self, *argv: str, timeout_s: float = UP_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv), cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s
        )

    def up(self, *argv: str) -> StackRecord:
        """Start in the background on a free port; its record is the one line on standard output."""
        done = self.run("up", "--port", "0", "--detach", "--json", *argv)
        assert done.returncode == 0, done.stderr
        self.record = StackRecord(**json.loads(done.stdout))
        return self.record

    def down(self) -> None:
        done = self.run("down", timeout_s=DOWN_S + 30)
        assert done.returncode == 0, done.stderr

    def kill_all(self) -> None:
        """For the end of a failed test."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ---------------------------------------------------------------------------------------- clients

    @property
    def url(self) -> str:
        assert self.record is not None
        return self.record.url

    def openai(self, key: str = "", **options: Any) -> OpenAI:
        """The official client; with its retries off, so that an error shows."""
        assert self.record is not None
        options = {"max_retries": 0, "timeout": 120.0} | options
        return OpenAI(base_url=f"{self.url}/v1", api_key=key or self.record.api_key, **options)

    def get(self, path: str) -> Any:
        """An admin's GET."""
        assert self.record is not None
        response = httpx.get(
            f"{self.url}{path}", headers={"Authorization": f"Bearer {self.record.admin_key}"}, timeout=10
        )
        response.raise_for_status()
        return response.json()

    def trace(self, answer_id: str, *spans: str) -> list[dict[str, Any]]:
        """The spans of a request, once all of those named have come."""

        seen: list[dict[str, Any]] = []

        def complete() -> bool:
            with suppress(httpx.HTTPStatusError):
                seen[:] = self.get(f"/baton/traces/{answer_id}")["spans"]
            return set(spans) <= {span["name"] for span in seen}

        until(complete, 30, what=lambda: f"{set(spans) - {span['name'] for span in seen}} in the trace")
        return seen

    def answers(self) -> bool:
        """A canary: one token for one short prompt."""
        assert self.record is not None
        headers = {"Authorization": f"Bearer {self.record.api_key}"}
        try:
            models = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=5).json()["data"]
            body = {"model": models[0]["id"], "prompt": "Hi", "max_tokens": 1}
            return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    # ---------------------------------------------------------------------------------------- state

    def pid(self, service: str) -> int:
        """Process id of a service such as `decode`; its module's name ends its command line."""
        found = [pid for pid, line in self.processes().items() if line.strip().endswith(f"services.{service}")]
        assert len(found) == 1, f"{service}: {found}"
        return found[0]

    def processes(self) -> dict[int, str]:
        """Living processes of this stack, found by environment, arguments or working folder; their command lines."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                traces = f"{line} {os.readlink(entry / 'cwd')}"
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"BATON_STATE={self.folder}".encode() in environment or str(self.folder) in traces:
                    found[int(entry.name)] = line
        found.pop(os.getpid(), None)
        return found

    def cpu_s(self) -> float:
        """Processor seconds its living processes have used."""
        total = 0.0
        for pid in self.processes():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def idle(self) -> bool:
        """Nothing queued, running, waiting or held, every block free, each by the newest word of who owns it."""
        found = self.get("/baton/cluster")
        scheduler, workers = found["scheduler"], found["workers"]
        counts = [found["gateway"]["requests"], *(w[name] for w in workers for name in IDLE_COUNTS)]
        free = [worker["free_blocks"] == worker["total_blocks"] for worker in workers]
        queue = [1] if scheduler is None else [scheduler["queued"], scheduler["running"]]
        return bool(workers) and not any(counts + queue) and all(free)

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Idle, and still idle one beat later."""
        until(self.idle, timeout_s, lambda: self.get("/baton/cluster"))
        since = time.monotonic()
        until(lambda: time.monotonic() - since > 1.2 and self.idle(), timeout_s, lambda: "still idle")

    def files(self) -> Iterator[Path]:
        """Everything the stack wrote, but its secrets."""
        state = StateFolder(self.folder)
        for path in self.folder.rglob("*"):
            if path.is_file() and state.secrets not in path.parents and path != state.record:
                yield path

    def traces_outside(self) -> Traces:
        """What `down` must take away, noted while the stack runs."""
        ports: set[int] = set()
        shared: set[str] = set()
        listening = listening_sockets()
        for pid in self.processes():
            with suppress(OSError):
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        target = os.readlink(entry)
                        if target.startswith("/dev/shm/"):
                            shared.add(target)
                        ports |= {port for port, inode in listening.items() if target == f"socket:[{inode}]"}
        return Traces(frozenset(ports), frozenset(shared))

    def nothing_left(self, traces: Traces) -> None:
        """No process, port, pool file or temporary file, and the state folder says that nothing runs."""
        until(lambda: not self.processes(), 30)
        state = StateFolder(self.folder)
        assert not traces.ports & listening_sockets().keys()
        assert not [path for path in traces.shared if Path(path).exists()]
        assert not state.pool_folder().exists()
        assert not list(state.run.iterdir())
        assert not state.record.exists()
        assert state.holder() is None
        assert not list(self.temporary.rglob("*"))


IDLE_COUNTS = ("running", "waiting", "attempts", "queue_tokens")


@dataclass(frozen=True)
class Traces:
    """Ports listened on and files in shared memory of a running stack."""

    ports: frozenset[int]
    shared: frozenset[str]


def listening_sockets() -> dict[int, str]:
    """TCP port to inode of every listening socket of this machine."""
    found: dict[int, str] = {}
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            for row in table.read_text().splitlines()[1:]:
                parts = row.split()
                if parts[3] == "0A":
                    found[int(parts[1].rpartition(":")[2], 16)] = parts[9]
    return found


def tenants_file(path: Path, keys: Sequence[tuple[str, str]]) -> Path:
    """A file for `policy.tenants`: (tenant, API key) each."""
    tenants = [
        {"id": tenant, "keys": [{"id": "first", "hash": hashlib.sha256(key.encode()).hexdigest()}]}
        for tenant, key in keys
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    path.chmod(0o600)
    return path
