"""Where things lie in Redis: a tenant's keys have the tenant in braces, so that a script meets one cluster slot."""

from __future__ import annotations

from pathlib import Path

from shared.contracts.errors import NotFound
from shared.contracts.ids import BatchId, FileId, TenantId, is_id

_LUA = Path(__file__).with_name("lua")


def lua(name: str) -> str:
    """The source of a script beside this file."""
    return (_LUA / f"{name}.lua").read_text()


class Keys:
    """Builds keys under `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    @property
    def tenants(self) -> str:
        """The set of tenants that ever had a file, a batch or a queued line."""
        return f"{self._prefix}:tenants"

    def of(self, tenant: TenantId, *parts: str) -> str:
        """A tenant's key, such as `of(tenant, "job", batch_id, "bodies")`."""
        return ":".join((self._prefix, f"{{{tenant}}}", *parts))

    def spared(self, tenant: TenantId, *parts: str) -> str:
        """A tenant's key that outlives its purges: numbers and times, no text."""
        return self.of(tenant, "purge", *parts)

    def file(self, tenant: TenantId, file_id: FileId, *parts: str) -> str:
        """A key of one file."""
        return self.of(tenant, "file", _checked(file_id), *parts)

    def job(self, tenant: TenantId, batch_id: BatchId, *parts: str) -> str:
        """A key of one batch."""
        return self.of(tenant, "job", _checked(batch_id), *parts)

    def job_parts(self, tenant: TenantId, batch_id: BatchId, *parts: str) -> list[str]:
        """Keys of several parts of one batch."""
        return [self.job(tenant, batch_id, part) for part in parts]


def _checked(name: str) -> str:
    # Ids come from strangers too: what is no id must not become a key.
    if not is_id(name):
        raise NotFound("there is nothing of this id", param="id")
    return name
