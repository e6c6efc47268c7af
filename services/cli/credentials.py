"""Passwords and keys of one stack: made once, kept in its state folder as 0600 files."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.cli.nats_config import nats_config
from shared.contracts.subjects import SERVICES
from shared.security.grant_signature import GrantSigner, private_pem, public_pem
from shared.store.secrets import ensure_secret, random_key, random_password, read_secret_text, write_private

DEMO_TENANT, ADMIN_TENANT = "demo", "admin"


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
    for service in SERVICES:
        ensure_secret(folder / f"nats-{service}", random_password)
    ensure_secret(folder / "redis", random_password)
    ensure_secret(folder / "master-key", random_key)
    ensure_secret(folder / "grant-key", lambda: private_pem(Ed25519PrivateKey.generate()))
    write_private(folder / "grant-public-key", public_pem(GrantSigner.from_file(folder / "grant-key").public_key))
    for name in ("api-key", "admin-key"):
        ensure_secret(folder / name, new_api_key)
    credentials = Credentials(folder, read_secret_text(folder / "api-key"), read_secret_text(folder / "admin-key"))
    passwords = {service: read_secret_text(credentials.nats_password(service)) for service in SERVICES}
    write_private(credentials.nats_config, nats_config(passwords).encode())
    write_private(credentials.bootstrap, bootstrap(credentials.api_key, credentials.admin_key))
    return credentials


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
