"""Secrets as files only their owner can read, and atomic writes.

A secret reaches a process as the path of a 0600 file, never on a command line, where every user of the machine could
read it.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from shared.contracts.errors import SettingsError


def read_secret(path: Path) -> bytes:
    """The content of a secret file. Raises SettingsError when it is missing, empty, or open to group or others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise SettingsError(f"{path}: secret file cannot be read: {exc.strerror}", param=str(path)) from exc
    with os.fdopen(descriptor, "rb") as file:
        # Of the open file, so that nobody can swap it between check and read.
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise SettingsError(f"{path}: mode {mode:04o} lets others read this secret; chmod 600 it", param=str(path))
        content = file.read()
    if not content:
        raise SettingsError(f"{path}: secret file is empty", param=str(path))
    return content


def read_secret_text(path: Path) -> str:
    """A secret that is one line of text, without its line end. Raises SettingsError."""
    try:
        return read_secret(path).decode().strip()
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{path}: secret file is not text", param=str(path)) from exc


def secret_path(env: Mapping[str, str], variable: str) -> Path:
    """The path in an environment variable such as BATON_MASTER_KEY_FILE. Raises SettingsError when it is not set."""
    if not env.get(variable):
        raise SettingsError(f"{variable} is not set; it names a file only its owner can read", param=variable)
    return Path(env[variable])


def ensure_secret(path: Path, make: Callable[[], bytes]) -> bytes:
    """The secret in `path`, made by `make` if there is none. Raises SettingsError as `read_secret` does."""
    if not path.exists():
        write_private(path, make())
    return read_secret(path)


def write_private(path: Path, content: bytes) -> None:
    """Write a 0600 file so that a reader sees the old content or the new, never a part."""
    _replace(path, content, 0o600)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file others may read so that a reader sees the old content or the new, never a part."""
    _replace(path, content, 0o644)


def random_key() -> bytes:
    """256 random bits."""
    return secrets.token_bytes(32)


def random_password() -> bytes:
    """A password of 256 random bits, in URL-safe text."""
    return secrets.token_urlsafe(32).encode()


def _replace(path: Path, content: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
