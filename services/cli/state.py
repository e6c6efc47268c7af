"""The state folder: what one stack keeps between starts, and the lock that makes it one stack.

lock        held by the supervisor while it lives
stack.json  of the running stack: address, keys, process id (0600)
secrets/    passwords and keys, made once (0600)
logs/       one file a process
run/        ready files; gone when nothing runs
wiped/      marks of pools that are gone, of which policy was not told yet
nats/ redis/  what the servers store
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from shared.contracts.errors import Conflict, SettingsError
from shared.kv.pool_file import mark_wiped, sweep, told, wiped
from shared.store.secrets import write_private

STOP_S = 120
"""The stop of a stack may take so long, and what streams are given."""
_STOP_LIMIT = "stop-limit"
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.02


@dataclass(frozen=True, slots=True)
class StackRecord:
    """A running stack, for `chat`, `trace`, `down` and programs. `pid` is the supervisor's."""

    url: str
    api_key: str
    admin_key: str
    pid: int


class StateFolder:
    """Paths inside one state folder; making it makes all of them, readable by their owner only.

    Raises SettingsError when it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.secrets = self.path / "secrets"
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self.nats = self.path / "nats"
        self.redis = self.path / "redis"
        self.marks = self.path / "wiped"
        self.record = self.path / "stack.json"
        try:
            for folder in (self.path, self.secrets, self.logs, self.run, self.nats, self.redis):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as exc:
            raise SettingsError(
                f"state folder {self.path} cannot be made: {exc.strerror}; set BATON_STATE to another",
                param="BATON_STATE",
            ) from exc

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def ready(self, name: str) -> Path:
        return self.run / f"{name}.ready"

    def pool_folder(self) -> Path:
        """Where the KV pools of this stack lie when no folder is set: private, on tmpfs where there is one."""
        shm = Path("/dev/shm")
        if os.access(shm, os.W_OK | os.X_OK):
            mark = hashlib.sha256(str(self.path).encode()).hexdigest()[:12]
            return shm / f"baton-{os.getuid()}-{mark}"
        return self.path / "kv"

    def clear_run(self) -> None:
        """Remove what only a running stack needs; also what a killed one left behind."""
        pools = self.pool_folder()
        for leftover in (self.run, pools):
            # Only ours: the name of the pool folder could be taken by somebody else.
            if leftover.is_dir() and not leftover.is_symlink() and leftover.stat().st_uid == os.getuid():
                if leftover == pools:
                    self._keep_marks(pools)
                shutil.rmtree(leftover, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.record.unlink()

    def _keep_marks(self, pools: Path) -> None:
        """Policy is told by a worker of the next start: until then purges wait for those that were killed."""
        with suppress(OSError):
            sweep(pools)
            self.marks.mkdir(mode=0o700, exist_ok=True)
            for worker in wiped(pools):
                mark_wiped(self.marks, worker)

    def hand_marks(self, pools: Path) -> None:
        """Leave the marks of earlier runs to the workers that use this folder."""
        gone = wiped(self.marks)
        for worker in gone:
            mark_wiped(pools, worker)
        told(self.marks, gone)

    def write_record(self, record: StackRecord) -> None:
        write_private(self.record, json.dumps(asdict(record)).encode())

    def write_stop_limit(self, limit_s: int) -> None:
        """Note how long the stop of the stack may take before the kernel ends it, for who waits for that."""
        (self.run / _STOP_LIMIT).write_text(str(limit_s))

    def stop_limit_s(self) -> int:
        """What was noted, or the usual."""
        try:
            return int((self.run / _STOP_LIMIT).read_text())
        except (OSError, ValueError):
            return STOP_S

    def lock(self) -> StackLock:
        """Become the one stack of this folder. Raises Conflict when another runs."""
        return StackLock(self.path / "lock")

    def holder(self) -> int | None:
        """Process id of the supervisor that holds the lock; None when nothing runs."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                text = file.read().strip()
                return int(text) if text.isdigit() else 0
        return None


class StackLock:
    """An exclusive lock that the kernel releases when its holder dies. Raises Conflict when another holds it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        try:
            _lock_soon(self._file)
        except BlockingIOError as exc:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise Conflict(
                f"Baton already runs on state folder {path.parent} (process {holder}); stop it with ./baton down, "
                "or set BATON_STATE to run a second one"
            ) from exc
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.truncate(0)
        self._file.close()


def _lock_soon(file: TextIO) -> None:
    """Lock, or raise BlockingIOError. Tries a few times: who only looks whether a stack runs holds it for a moment."""
    for _ in range(LOCK_TRIES - 1):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        else:
            return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def state_path(env: Mapping[str, str]) -> Path:
    """`$BATON_STATE`, else `$XDG_STATE_HOME/baton`, else `~/.local/state/baton`."""
    if env.get("BATON_STATE"):
        return Path(env["BATON_STATE"]).expanduser().absolute()
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"]) / "baton"
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    return home / ".local" / "state" / "baton"


def running_stack(env: Mapping[str, str]) -> StackRecord | None:
    """The stack that runs on the state folder of this environment and is ready, or None."""
    path = state_path(env)
    if not path.is_dir() or StateFolder(path).holder() is None:
        return None
    try:
        return StackRecord(**json.loads((path / "stack.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
