"""Where a worker's pool lies and where its loopback address leads, as names that two processes can compare."""

from __future__ import annotations

import hashlib
from pathlib import Path

_NETWORK = Path("/proc/self/ns/net")


def place_of(folder: Path, boot_id: str) -> str:
    """A name of the folder itself: containers that mount one volume agree, whatever they call it.

    Returns 32 hex digits; empty when there is no such folder.
    """
    return _name_of(folder, boot_id)


def network_of(boot_id: str) -> str:
    """A name of the network this process lives in: whose share it reach each other by loopback."""
    return _name_of(_NETWORK, boot_id)


def _name_of(path: Path, boot_id: str) -> str:
    try:
        found = path.stat()
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot_id}|{found.st_dev}|{found.st_ino}".encode(), digest_size=16).hexdigest()
