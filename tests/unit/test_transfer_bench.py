"""`python -m loadtest.transfer`: pulls by every way between two processes, and what is made of requests."""

from __future__ import annotations

import pytest

from loadtest import transfer, transfer_requests
from shared.contracts.errors import SettingsError


def test_every_way_is_measured_and_told() -> None:
    found = transfer.measure_pulls(0.0, enough=1)
    assert list(found) == ["shared memory", "TCP", "TCP, TLS", "TCP, 4 at once"]
    for row in found.values():
        assert row["bytes_s"] > 0
        assert row["processor_s_gb"] > 0
        assert row["samples"] >= 1
    machine = {"cpu": "x", "cores": 2, "date": "today"}
    text = "\n".join(transfer.lines_of({"machine": machine, "pulls": found}))
    assert all(name in text for name in found)


def test_figures_of_requests_keep_transfers_apart_from_requests_without_one() -> None:
    def row(ttft_s: float, num_bytes: float = 0.0, transfer_s: float = 0.0) -> dict[str, float]:
        told = {"ttft_s": ttft_s, "queue_s": 0.001, "transfer_s": transfer_s, "transfer_queue_s": 0.002}
        return {**told, "bytes": num_bytes, "foreign_cores": 0.0}

    found = transfer_requests.figures([row(1.0, 4e6, 0.01), row(2.0), row(3.0, 6e6, 0.03)])
    assert (found["requests"], found["handed_off"], found["ttft_s"]) == (3, 2, 2.0)
    assert found["transfer_s"] == pytest.approx(0.02)
    assert found["bytes"] == 5e6
    assert transfer_requests.figures([row(1.0)])["transfer_s"] == 0.0
    text = "\n".join(transfer_requests.lines_of({"TCP": found}))
    assert "2 of 3" in text


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(SettingsError, match="NAME=VALUE"):
        transfer_requests.measure(1, 10, ["kv.block_size"])
