"""`./baton bench host`: accounts of processes, figures a token, and what the native kernels tell of themselves."""

from __future__ import annotations

import pytest

from loadtest import bench, host_time
from loadtest.host_time import Look, Sample, figures, host_s, process_name, stack_settings, text_of
from shared.contracts.errors import Unavailable

PIDS = frozenset({1, 2})


def test_kernels_are_taken_off_their_own_process() -> None:
    before = Look({"gateway": 1.0, "decode": 10.0}, {"decode": 7.0}, PIDS)
    after = Look({"gateway": 1.5, "decode": 14.0}, {"decode": 10.0}, PIDS)
    assert host_s(before, after) == {"gateway": 0.5, "decode": 1.0}


def test_a_process_that_began_or_ended_spoils_the_account() -> None:
    with pytest.raises(Unavailable, match="changed"):
        host_s(Look({"gateway": 1.0}, {}, PIDS), Look({"gateway": 1.0}, {}, frozenset({1, 3})))


def sample(width: int, foreign: float, gateway_s: float) -> Sample:
    gaps = tuple(0.001 * i for i in range(1, 101))
    return Sample(width, 100, 2.0, foreign, gaps, {"gateway": gateway_s, "decode": 0.1}, 1.0)


def test_a_figure_is_of_the_least_disturbed_loop() -> None:
    one, eight = figures([sample(1, 0.9, 9.0), sample(8, 0.0, 0.1), sample(1, 0.1, 0.3)])
    assert (one["width"], one["ms_a_token"], one["idle"]) == (1, pytest.approx(4.0), True)
    assert one["by_process"] == {"gateway": pytest.approx(3.0), "decode": pytest.approx(1.0)}
    assert (one["kernel_ms_a_token"], one["tokens_s"]) == (pytest.approx(10.0), pytest.approx(50.0))
    assert (one["itl_p50_ms"], one["itl_p95_ms"]) == (pytest.approx(51.0), pytest.approx(96.0))
    assert eight["ms_a_token"] == pytest.approx(2.0)


def test_a_busy_machine_is_told_below_the_table() -> None:
    head = {"model": "m", "machine": {"cpu": "x", "date": "today"}}
    idle = text_of(head | {"figures": figures([sample(1, 0.0, 0.3)])})
    assert [line.split()[-1] for line in idle.splitlines()[3:6]] == ["1.000", "3.000", "4.000"]
    assert "no measure" not in idle
    assert "no measure" in text_of(head | {"figures": figures([sample(1, 0.5, 0.3)])})


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (b"/x/python\0-m\0services.gateway\0", "gateway"),
        (b"/x/python\0-m\0services.cli\0up\0", "cli"),
        (b"/x/nats-server\0-c\0/y\0", "nats-server"),
        (b"valkey-server 127.0.0.1:5\0\0", "valkey-server"),
        (b"", ""),
    ],
)
def test_processes_are_named_by_what_they_run(command: bytes, name: str) -> None:
    assert process_name(command) == name


def test_settings_of_the_stack_can_be_changed() -> None:
    assert stack_settings(["engine.depth=0"])["engine.depth"] == "0"
    with pytest.raises(ValueError, match="expected SECTION"):
        stack_settings(["engine.depth"])


def test_the_command_is_part_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["host", "--set", "nonsense"]) == 1
    assert "SECTION.FIELD" in capsys.readouterr().err
    assert host_time.WIDTHS == (1, 8, 32)
