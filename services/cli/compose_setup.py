"""The one-shot `setup` service of compose.yaml: secrets made once, each service's in a volume of its own.

Runs as root in its container, since it hands the volumes to the user the services run as. It prints no secret;
`show-keys` does, for the operator.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from services.cli.credentials import Credentials, ensure_credentials
from services.cli.topology import SECRET_FILES
from shared.contracts.errors import BatonError
from shared.contracts.subjects import SERVICES
from shared.store.secrets import read_secret_text, write_private

ALL = "all"
"""Subfolder of the secrets root that only `setup` mounts: everything, kept between starts."""


def shares(credentials: Credentials) -> dict[str, dict[str, Path]]:
    """Service → file name in its volume → the secret it is a copy of. No service gets another's."""
    wanted: dict[str, dict[str, Callable[[Credentials], Path]]] = {
        name: SECRET_FILES.get(name, {}) for name in SERVICES
    }
    found = {
        name: {_file_name(variable): path(credentials) for variable, path in files.items()}
        for name, files in wanted.items()
    }
    for name in SERVICES:
        found[name]["nats-password"] = credentials.nats_password(name)
    found["nats"] = {"nats.conf": credentials.nats_config}
    return found


def redis_config(password: str) -> str:
    """Redis with a password and an append-only file. Pure."""
    return f"requirepass {password}\nappendonly yes\ndir /data\n"


def set_up(root: Path, env: Mapping[str, str]) -> None:
    """Make what is missing under `root`, and give it and the data volumes to the services' user.

    Raises SettingsError when the secrets are readable by others or the volumes are not there.
    """
    credentials = ensure_credentials(root / ALL)
    for name, files in shares(credentials).items():
        for file_name, source in files.items():
            (root / name).mkdir(mode=0o700, exist_ok=True)
            write_private(root / name / file_name, source.read_bytes())
    (root / "redis").mkdir(mode=0o700, exist_ok=True)
    password = read_secret_text(credentials.redis_password)
    write_private(root / "redis" / "redis.conf", redis_config(password).encode())
    owner = env.get("BATON_OWNER", "")
    if owner:
        volumes = [root / name for name in (*shares(credentials), "redis")]
        volumes += [Path(folder) for folder in env.get("BATON_DATA_VOLUMES", "").split(":") if folder]
        for volume in volumes:
            _give(volume, int(owner))


def main(argv: list[str]) -> int:
    root = Path(os.environ.get("BATON_SECRETS", "/secrets"))
    try:
        if argv == ["show-keys"]:
            for name in ("api-key", "admin-key"):
                print(f"{name}: {read_secret_text(root / ALL / name)}")
            return 0
        if argv:
            print("usage: python -m services.cli.compose_setup [show-keys]", file=sys.stderr)
            return 2
        set_up(root, os.environ)
    except (BatonError, OSError) as exc:
        print(f"setup: {exc}", file=sys.stderr)
        return 1
    print("setup: secrets and volumes are in place")
    return 0


def _file_name(variable: str) -> str:
    """`BATON_GRANT_KEY_FILE` → `grant-key`."""
    return variable.removeprefix("BATON_").removesuffix("_FILE").lower().replace("_", "-")


def _give(folder: Path, owner: int) -> None:
    shutil.chown(folder, owner, owner)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.chown(path, owner, owner)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
