"""API keys: read from headers, hashed, and policy's answer remembered for a short while. Pure."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

from shared.contracts.errors import Unauthenticated
from shared.contracts.ids import TenantId
from shared.contracts.messages import Identity, PolicyEvent

CACHE_S = 5.0
MAX_CACHED = 4096
MAX_KEY_CHARS = 512
KEY_NEEDED = "a valid API key is needed: Authorization: Bearer KEY"
"""Said of a missing key and of a wrong one alike."""


def key_hash(headers: Mapping[str, str]) -> bytes:
    """SHA-256 of the bearer key, or without an Authorization of that in `x-api-key`, as Anthropic's clients send it.

    Raises Unauthenticated when there is none.
    """
    given = headers.get("authorization")
    scheme, _, key = (f"Bearer {headers.get('x-api-key', '')}" if given is None else given).partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY_CHARS:
        raise Unauthenticated(KEY_NEEDED)
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class IdentityCache:
    """policy's answers by key hash, each for at most `ttl_s` seconds; refusals are never kept."""

    def __init__(self, ttl_s: float = CACHE_S, capacity: int = MAX_CACHED) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._entries: OrderedDict[bytes, tuple[float, Identity]] = OrderedDict()
        self._changes = 0

    @property
    def changes(self) -> int:
        """Counts policy events; read it before asking policy, pass it to `put`."""
        return self._changes

    def get(self, key: bytes, now: float) -> Identity | None:
        """The identity of a key, if it was told less than `ttl_s` ago."""
        found = self._entries.get(key)
        if found is None or now - found[0] >= self._ttl_s:
            self._entries.pop(key, None)
            return None
        return found[1]

    def put(self, key: bytes, identity: Identity, asked: float, changes: int) -> None:
        """Keep an answer to a question sent at `asked`; not if an event came since, which it may not know."""
        if changes != self._changes:
            return
        self._entries[key] = (asked, identity)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def on_event(self, event: PolicyEvent) -> None:
        """Forget what the event may have changed."""
        self._changes += 1
        stale = [key for key, (_, identity) in self._entries.items() if self._touches(event, identity)]
        for key in stale:
            del self._entries[key]

    @staticmethod
    def _touches(event: PolicyEvent, identity: Identity) -> bool:
        if event.tenant not in ("", identity.tenant):
            return False
        return not event.key_id or event.key_id == identity.key_id or event.tenant == TenantId("")
