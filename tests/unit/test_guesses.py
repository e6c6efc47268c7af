"""Keys nobody knows: what is remembered of them, and of who sends them."""

from __future__ import annotations

import pytest

from services.gateway import guesses
from services.gateway.guesses import GOOD_S, GUESSES, GUESSES_A_SECOND, REFUSED_S, Guesses, network


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_refused_key_is_refused_for_a_while_and_until_keys_change() -> None:
    seen = Guesses()
    seen.on_refused(key(1), "10.0.0.1", 100.0)
    assert seen.refused(key(1), 100.0 + REFUSED_S - 0.1)
    assert not seen.refused(key(1), 100.0 + REFUSED_S + 0.1)
    assert not seen.refused(key(2), 100.0)
    seen.forget_refused()
    assert not seen.refused(key(1), 100.0)


def test_an_address_has_so_many_guesses_and_gets_new_ones_with_time() -> None:
    seen = Guesses()
    for number in range(int(GUESSES)):
        assert seen.wait_s(key(number), "10.0.0.1", 0.0) == 0.0
        seen.on_refused(key(number), "10.0.0.1", 0.0)
    wait_s = seen.wait_s(key(99), "10.0.0.1", 0.0)
    assert wait_s == pytest.approx(1 / GUESSES_A_SECOND)
    assert seen.wait_s(key(99), "10.0.0.2", 0.0) == 0.0
    # a retry after the wait is let through
    assert seen.wait_s(key(99), "10.0.0.1", wait_s) == pytest.approx(0.0)


def test_good_keys_cost_no_guesses_and_are_let_through() -> None:
    seen = Guesses()
    seen.on_good(key(1), 0.0)
    for number in range(10, 100):
        seen.on_refused(key(number), "10.0.0.1", 0.0)
    assert seen.wait_s(key(1), "10.0.0.1", 0.0) == 0.0
    assert seen.wait_s(key(2), "10.0.0.1", 0.0) > 0
    # once it is no longer good it is a guess like others
    seen.on_refused(key(1), "10.0.0.1", 0.0)
    assert seen.wait_s(key(1), "10.0.0.1", 0.0) > 0
    assert seen.wait_s(key(2), "10.0.0.1", GOOD_S) == 0.0


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "MAX_KEPT", 10)
    seen = Guesses()
    for number in range(100):
        seen.on_refused(key(number), f"10.0.0.{number}", 0.0)
        seen.on_good(key(1000 + number), 0.0)
    assert [len(table) for table in (seen._refused, seen._good, seen._left)] == [10, 10, 10]


@pytest.mark.parametrize(
    ("address", "who"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("a name", "a name"),
    ],
)
def test_one_client_is_one_network(address: str, who: str) -> None:
    assert network(address) == who
