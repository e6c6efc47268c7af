"""Passwords and keys of one stack: made once, kept in its state folder as 0600 files.

Tenants' NATS users come and go while a stack runs: `add_queue_tenant`, `remove_queue_tenant`. What they write takes
effect when the NATS server reads its configuration anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.cli.nats_config import USERS, check_tenant, nats_config
from shared.contracts.ids import TenantId
from shared.security.grant_signature import GrantSigner, private_pem, public_pem
from shared.store.secrets import ensure_secret, random_key, random_password, read_secret_text, write_private

DEMO_TENANT, ADMIN_TENANT = "demo", "admin"
_QUEUE_PREFIX = "queue-tenant-"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where each secret lies, and the two API keys shown to the user."""

    folder: Path
    api_key: str
    admin_key: str

    def nats_password(self, service: str) -> Path:
        return self.folder / f"nats-{service}"

    @property
    def nats_config(self) -> Path:
        return self.folder / "nats.conf"

    @property
    def nats_store_key(self) -> Path:
        """Encrypts what NATS keeps on disk."""
        return self.folder / "nats-store-key"

    @property
    def queue_tenants(self) -> Path:
        """JSON list of the tenants with a NATS user of their own, for the batch service."""
        return self.folder / "queue-tenants"

    def queue_password(self, tenant: TenantId) -> Path:
        """Of a tenant's NATS user."""
        return self.folder / f"{_QUEUE_PREFIX}{tenant}"

    @property
    def redis_password(self) -> Path:
        return self.folder / "redis"

    @property
    def grant_key(self) -> Path:
        """policy's Ed25519 private key, PEM."""
        return self.folder / "grant-key"

    @property
    def grant_public_key(self) -> Path:
        """Its public key, PEM."""
        return self.folder / "grant-public-key"

    @property
    def master_key(self) -> Path:
        """32 raw bytes: seals stored texts."""
        return self.folder / "master-key"

    @property
    def bootstrap(self) -> Path:
        """Tenants and key hashes that policy makes sure of when it starts."""
        return self.folder / "bootstrap.json"


def ensure_credentials(folder: Path) -> Credentials:
    """Make what is missing; what exists stays. Raises SettingsError when others can read a secret."""
    for user in USERS:
        ensure_secret(folder / f"nats-{user}", random_password)
    for name in ("redis", "nats-store-key"):
        ensure_secret(folder / name, random_password)
    ensure_secret(folder / "master-key", random_key)
    ensure_secret(folder / "grant-key", lambda: private_pem(Ed25519PrivateKey.generate()))
    write_private(folder / "grant-public-key", public_pem(GrantSigner.from_file(folder / "grant-key").public_key))
    for name in ("api-key", "admin-key"):
        ensure_secret(folder / name, new_api_key)
    credentials = Credentials(folder, read_secret_text(folder / "api-key"), read_secret_text(folder / "admin-key"))
    write_private(credentials.bootstrap, bootstrap(credentials.api_key, credentials.admin_key))
    with _locked(folder):
        _write_nats(credentials)
    return credentials


def queue_tenants(credentials: Credentials) -> tuple[TenantId, ...]:
    """The tenants with a NATS user of their own."""
    names = (path.name.removeprefix(_QUEUE_PREFIX) for path in credentials.folder.glob(f"{_QUEUE_PREFIX}*"))
    return tuple(sorted(check_tenant(name) for name in names))


def add_queue_tenant(credentials: Credentials, tenant: TenantId) -> str:
    """Give the tenant a NATS user, unless it has one; the password. Raises InvalidInput for an id no subject may hold,
    before anything is written."""
    check_tenant(tenant)
    with _locked(credentials.folder):
        ensure_secret(credentials.queue_password(tenant), random_password)
        _write_nats(credentials)
    return read_secret_text(credentials.queue_password(tenant))


def remove_queue_tenant(credentials: Credentials, tenant: TenantId) -> bool:
    """Take the tenant's NATS user away; False when it had none. A later one gets another password."""
    check_tenant(tenant)
    with _locked(credentials.folder):
        had = credentials.queue_password(tenant).exists()
        with suppress(FileNotFoundError):
            credentials.queue_password(tenant).unlink()
        _write_nats(credentials)
    return had


def _write_nats(credentials: Credentials) -> None:
    passwords = {user: read_secret_text(credentials.nats_password(user)) for user in USERS}
    tenants = {tenant: read_secret_text(credentials.queue_password(tenant)) for tenant in queue_tenants(credentials)}
    write_private(
        credentials.nats_config, nats_config(passwords, tenants, read_secret_text(credentials.nats_store_key)).encode()
    )
    write_private(credentials.queue_tenants, json.dumps(list(tenants)).encode())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time: two that add a tenant each would otherwise lose one of them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def new_api_key() -> bytes:
    """An API key of 192 random bits."""
    return b"sk-baton-" + secrets.token_urlsafe(24).encode()


def bootstrap(api_key: str, admin_key: str) -> bytes:
    """The tenants of a fresh stack as policy reads them; it never sees the keys themselves. Pure."""

    def tenant(name: str, key: str, admin: bool) -> dict[str, object]:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return {"id": name, "keys": [{"id": name, "hash": digest, "admin": admin}]}

    tenants = [tenant(DEMO_TENANT, api_key, admin=False), tenant(ADMIN_TENANT, admin_key, admin=True)]
    return json.dumps({"tenants": tenants}, indent=2).encode()
