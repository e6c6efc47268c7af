"""Whose tag is it? Remembers which scope every recent tag was computed for, in bounded memory. Pure.

A tag says nothing about its scope, so a parent named by a worker is believed only if this process computed it itself
for the same scope and group, from tokens. What was forgotten is computed again when the whole prefix is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from shared.contracts.errors import Conflict, Forbidden
from shared.contracts.ids import BlockTag

CAPACITY = 262_144

Owner = tuple[str, int]  # (scope id, salted or not; layer group)

_SALT = "/"


def salted(scope_id: str, salt: bytes) -> str:
    """What stands for a scope where only requests of one salt share."""
    return f"{scope_id}{_SALT}{salt.hex()}" if salt else scope_id


class IssuedTags:
    """Tag to owner, the least recently used forgotten first.

    Args:
        capacity: tags remembered; about 250 bytes each.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[BlockTag, Owner] = OrderedDict()
        self._tags: dict[str, set[BlockTag]] = {}  # by scope id, whatever the salt

    def __len__(self) -> int:
        return len(self._owners)

    def remember(self, scope_id: str, group: int, tags: Iterable[BlockTag]) -> None:
        """These tags were computed for this scope and group."""
        owner = (scope_id, group)
        for tag in tags:
            known = self._owners.get(tag)
            if known != owner:
                if known is not None:
                    self._leave(tag, known)
                self._owners[tag] = owner
                self._tags.setdefault(_unsalted(scope_id), set()).add(tag)
            self._owners.move_to_end(tag)
        while len(self._owners) > self._capacity:
            self._leave(*self._owners.popitem(last=False))

    def forget(self, scope_ids: Collection[str]) -> list[tuple[int, BlockTag]]:
        """Forget every tag of these scopes, under whatever salt; (layer group, tag) of each."""
        gone = [tag for scope_id in set(scope_ids) for tag in self._tags.pop(scope_id, ())]
        return [(self._owners.pop(tag)[1], tag) for tag in gone]

    def check_parent(self, scope_id: str, group: int, parent: BlockTag) -> None:
        """Raises Conflict (`unknown_parent`: send the whole prefix) or Forbidden (`foreign_parent`)."""
        if not parent:
            return
        owner = self._owners.get(parent)
        if owner is None:
            raise Conflict("the parent tag is not known here; send the whole prefix", code="unknown_parent")
        if owner != (scope_id, group):
            raise Forbidden("the parent tag is of another scope or group", code="foreign_parent")

    def _leave(self, tag: BlockTag, owner: Owner) -> None:
        scope_id = _unsalted(owner[0])
        tags = self._tags[scope_id]
        tags.discard(tag)
        if not tags:
            del self._tags[scope_id]


def _unsalted(scope_id: str) -> str:
    return scope_id.partition(_SALT)[0]
