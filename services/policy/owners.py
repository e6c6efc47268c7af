"""Whose key it is: both records, and what was read of them, so that a later reading shows whether they still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.policy.records import Command, Records, key_of, tenant_of
from services.policy.tenants import KeyRecord, TenantRecord, check_key
from shared.contracts.errors import Unauthenticated

MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class Owner:
    """A live key and its tenant. `read`: the two records as they were read."""

    tenant: TenantRecord
    key: KeyRecord
    read: tuple[bytes, bytes]

    def holds(self, again: Sequence[bytes | None]) -> bool:
        """True when both records were read again and are the same."""
        return tuple(again) == self.read


class Owners:
    """The owners of keys. Those that `known` tells were read some time ago: they count only once they are read again.

    `read` and `commands` read the records; the former raises Unavailable when Redis does not answer.
    """

    def __init__(self, records: Records, capacity: int = MAX_KNOWN) -> None:
        self._records = records
        self._capacity = capacity
        self._known: OrderedDict[bytes, Owner] = OrderedDict()

    async def read(self, key_hash: bytes) -> Owner:
        """Whose key this is now. Raises Unauthenticated for one that nobody has."""
        self._known.pop(key_hash, None)
        key_data = await self._records.read(self._records.key_command(key_hash))
        key = check_key(key_hash, key_of(key_data))
        tenant_data = await self._records.read(self._records.tenant_command(key.tenant))
        tenant = tenant_of(tenant_data)
        if tenant is None or key_data is None or tenant_data is None:
            raise Unauthenticated("the API key is not valid")
        owner = self._known[key_hash] = Owner(tenant, key, (key_data, tenant_data))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return owner

    def known(self, key_hash: bytes) -> Owner | None:
        """Whose key it was when it was last read."""
        return self._known.get(key_hash)

    def commands(self, key_hash: bytes, owner: Owner) -> tuple[Command, Command]:
        """Read both records of a known owner, for `Owner.holds`."""
        return self._records.key_command(key_hash), self._records.tenant_command(owner.tenant.id)
