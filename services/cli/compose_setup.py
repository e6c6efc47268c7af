"""The one-shot `setup` service of compose.yaml: secrets made once, each service's in a volume of its own.

Runs as root in its container, since it hands the volumes to the user the services run as. It prints no secret;
`show-keys` and `nats-key` do, for the operator.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from services.cli.credentials import Credentials, add_queue_tenant, ensure_credentials
from services.cli.keys import shown
from services.cli.nats_config import check_tenant
from services.cli.queue_user import describe
from services.cli.topology import SECRET_FILES
from shared.contracts.errors import BatonError
from shared.contracts.subjects import SERVICES
from shared.store.secrets import read_secret_text, write_private

ALL = "all"
"""Subfolder of the secrets root that only `setup` mounts: everything, kept between starts."""
RELOAD = """
In force once NATS has read its configuration anew. Twice, since it takes the imports of a new account at the next time:

  docker compose kill -s HUP nats; sleep 1; docker compose kill -s HUP nats
"""


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
        for volume in [root / name for name in (*shares(credentials), "redis")]:
            _give(volume, int(owner))
        for folder in env.get("BATON_DATA_VOLUMES", "").split(":"):
            if folder and not is_somebodys(Path(folder), int(owner)):
                _give(Path(folder), int(owner))


def is_somebodys(folder: Path, owner: int) -> bool:
    """True of a folder with something in it that is not the services' user's: the operator's own, left as it is."""
    return folder.stat().st_uid != owner and any(folder.iterdir())


def nats_key(root: Path, name: str, env: Mapping[str, str]) -> str:
    """A tenant's credential for the queue, made if there is none, in the words of `./baton keys nats`.

    Raises InvalidInput for a name no subject may hold, before anything is written.
    """
    tenant = check_tenant(name)
    password = add_queue_tenant(ensure_credentials(root / ALL), tenant)
    set_up(root, env)
    user = describe(tenant, password, env.get("BATON_QUEUE_URL", "nats://nats:4222"))
    return shown(user, env.get("BATON_MODEL_NAME", "smollm2-135m-instruct")) + RELOAD


def main(argv: list[str]) -> int:
    root = Path(os.environ.get("BATON_SECRETS", "/secrets"))
    try:
        if argv == ["show-keys"]:
            for name in ("api-key", "admin-key"):
                print(f"{name}: {read_secret_text(root / ALL / name)}")
            return 0
        if argv[:1] == ["nats-key"] and len(argv) == 2:
            print(nats_key(root, argv[1], os.environ))
            return 0
        if argv:
            print("usage: python -m services.cli.compose_setup [show-keys | nats-key TENANT]", file=sys.stderr)
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
