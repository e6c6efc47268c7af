"""Keys that policy does not know: remembered, so that none is asked about twice, and counted by who sends them. Pure.

A stranger who tries keys costs us a question each, and those who are served wait behind it. So a key that was refused
is refused here for a while, and an address whose keys were refused too often may not ask about further ones for now.
A key that was good lately is always asked about, whatever else comes from its address: many clients share one.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

REFUSED_S = 5.0
"""A key made after it was tried in vain works at the latest so much later."""
GOOD_S = 600.0
GUESSES = 20.0
"""Refused keys of an address in a row; after them one each `1 / GUESSES_A_SECOND`."""
GUESSES_A_SECOND = 2.0
MAX_KEPT = 4096

Key = TypeVar("Key")
Value = TypeVar("Value")


class Guesses:
    """What is known of keys and addresses. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._refused: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._good: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # guesses left, when

    def refused(self, key: bytes, now: float) -> bool:
        """True for the hash of a key that was refused a moment ago."""
        return self._refused.get(key, now) > now

    def wait_s(self, key: bytes, address: str, now: float) -> float:
        """Seconds until policy may be asked about a key for this address; 0: now."""
        if self._good.get(key, now) > now:
            return 0.0
        return max(0.0, (1.0 - self._guesses_left(network(address), now)) / GUESSES_A_SECOND)

    def on_refused(self, key: bytes, address: str, now: float) -> None:
        """Policy does not know the key."""
        self._good.pop(key, None)
        _keep(self._refused, key, now + REFUSED_S)
        where = network(address)
        _keep(self._left, where, (max(0.0, self._guesses_left(where, now) - 1.0), now))

    def on_good(self, key: bytes, now: float) -> None:
        """Policy knows the key."""
        _keep(self._good, key, now + GOOD_S)

    def forget_refused(self) -> None:
        """Keys may have changed."""
        self._refused.clear()

    def _guesses_left(self, where: str, now: float) -> float:
        left, then = self._left.get(where, (GUESSES, now))
        return min(GUESSES, left + (now - then) * GUESSES_A_SECOND)


def network(address: str) -> str:
    """Who stands behind an address: an IPv4 address, or the /64 of an IPv6 one, which one client has whole."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if not isinstance(parsed, IPv6Address):
        return address
    return str(parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64))


def _keep(table: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_KEPT:
        table.popitem(last=False)
