"""Workers that compute at the same time share the cores; a worker that dies leaves its part to the others."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.contracts.ids import WorkerId
from shared.engine import core_share
from shared.engine.core_share import LINGER_S, REFRESH_S, CoreShare, open_share, share_of
from shared.engine.cores import parse_cpu_max, quota_cores, usable_cores
from shared.engine.model_steps import ModelSteps
from shared.engine.step_plan import StepOutput, StepPlan

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def share(folder: Path, name: str, cores: int, clock: Clock) -> CoreShare:
    return CoreShare(folder / "cores", WorkerId(name), cores, clock)


def threads(worker: CoreShare) -> int:
    with worker.step() as count:
        return count


@pytest.mark.parametrize(("cores", "workers"), list(itertools.product((1, 2, 3, 4, 7, 8), (1, 2, 3, 5))))
def test_shares_use_all_cores_once(cores: int, workers: int) -> None:
    names = [f"w{i}" for i in range(workers)]
    shares = [share_of(cores, names, name) for name in names]
    assert sum(shares) == max(cores, workers)
    assert max(shares) - min(shares) <= 1
    # who does not see itself among them counts all the same
    assert shares == [share_of(cores, [other for other in names if other != name], name) for name in names]


def test_alone_a_worker_has_all_cores_and_beside_another_its_part(tmp_path: Path, clock: Clock) -> None:
    one, two = share(tmp_path, "one", 4, clock), share(tmp_path, "two", 4, clock)
    assert threads(one) == 4
    clock.now += LINGER_S + 0.001
    with one.step() as first:
        assert first == 4
        assert threads(two) == 2
        assert threads(two) == 2
    # the first goes on: its next step comes before it could be taken for idle
    clock.now += LINGER_S / 2
    assert threads(two) == 2
    clock.now += 10 * LINGER_S
    assert threads(two) == 4


def test_a_step_that_fails_ends_too(tmp_path: Path, clock: Clock) -> None:
    one, two = share(tmp_path, "one", 2, clock), share(tmp_path, "two", 2, clock)
    with pytest.raises(ValueError, match="bad"), one.step():
        raise ValueError("bad")
    assert threads(two) == 1
    clock.now += 2 * LINGER_S
    assert threads(two) == 2


def test_workers_come_and_go(tmp_path: Path, clock: Clock) -> None:
    one = share(tmp_path, "one", 6, clock)
    assert threads(one) == 6
    two = share(tmp_path, "two", 6, clock)
    with two.step():
        clock.now += REFRESH_S
        assert threads(one) == 3
        three = share(tmp_path, "three", 6, clock)
        with three.step():
            clock.now += REFRESH_S
            assert threads(one) == 2
            three.close()
            clock.now += REFRESH_S
            assert threads(one) == 3
    two.close()
    assert [path.name for path in (tmp_path / "cores").iterdir()] == ["one.slot"]
    one.close()
    assert not list((tmp_path / "cores").iterdir())


def test_a_killed_worker_is_forgotten(tmp_path: Path, clock: Clock) -> None:
    one = share(tmp_path, "one", 2, clock)
    code = (
        "import sys, time; from pathlib import Path; from shared.engine.core_share import CoreShare\n"
        "worker = CoreShare(Path(sys.argv[1]), 'two', 2)\n"
        "with worker.step():\n"
        "    print('computing', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cores")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"computing\n"
        assert threads(one) == 1
        worker.kill()
    assert threads(one) == 1
    clock.now += REFRESH_S
    assert threads(one) == 2
    assert [path.name for path in (tmp_path / "cores").iterdir()] == ["one.slot"]


def test_files_that_are_no_slots_disturb_nobody(tmp_path: Path, clock: Clock) -> None:
    one = share(tmp_path, "one", 2, clock)
    (tmp_path / "cores" / "note.txt").write_text("hello")
    (tmp_path / "cores" / "link.slot").symlink_to(tmp_path / "nowhere")
    (tmp_path / "cores" / "folder.slot").mkdir()
    assert threads(one) == 2
    assert (tmp_path / "cores" / "folder.slot").is_dir()


def test_a_slot_that_is_taken_before_it_is_locked_is_made_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = os.open, []

    def removed_once(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags, mode)
        if not taken:
            taken.append(path)
            os.unlink(path)
        return fd

    monkeypatch.setattr(core_share.os, "open", removed_once)
    one = share(tmp_path, "one", 2, clock)
    monkeypatch.undo()
    assert taken
    assert (tmp_path / "cores" / "one.slot").exists()
    two = share(tmp_path, "two", 2, clock)
    with one.step():
        assert threads(two) == 1


def test_a_folder_that_cannot_be_used_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cores").write_text("")
    assert open_share(tmp_path / "cores", WorkerId("one"), 2) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"cannot share cores with other workers through {tmp_path / 'cores'}: ")


def test_whole_cores_of_a_quota_count() -> None:
    texts = ("max 100000\n", "150000 100000\n", "50000 100000\n", "400000 100000", "-1 100000", "1 0", "", "x y")
    assert [parse_cpu_max(text) for text in texts] == [None, 1, 1, 4, None, None, None, None]


def test_the_least_quota_on_the_way_counts(tmp_path: Path) -> None:
    inner = tmp_path / "pods" / "one"
    inner.mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pods" / "cpu.max").write_text("350000 100000\n")
    assert quota_cores(tmp_path, "0::/pods/one\n") == 3
    (inner / "cpu.max").write_text("200000 100000\n")
    assert quota_cores(tmp_path, "0::/pods/one\n") == 2
    # a container that sees the host's path, and its own group as the root
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert quota_cores(tmp_path, "0::/docker/abc\n") == 1
    assert quota_cores(tmp_path / "none", "0::/\n") is None


def test_quotas_of_the_first_kind_of_control_groups(tmp_path: Path) -> None:
    group = tmp_path / "cpu,cpuacct" / "box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("250000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group.parent / "cpu.cfs_quota_us").write_text("-1\n")
    (group.parent / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path, "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n") == 2
    assert quota_cores(tmp_path, "3:cpuset:/box\n") is None


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_a_model_is_told_its_threads_before_each_step(tmp_path: Path, clock: Clock) -> None:
    one, two = share(tmp_path, "one", 2, clock), share(tmp_path, "two", 2, clock)
    told: list[object] = []
    plan = StepPlan(7, ())

    def step(given: StepPlan) -> StepOutput:
        told.append(given)
        return StepOutput(given.step, ())

    steps = ModelSteps(step, lambda group, blocks: None, one, told.append)
    assert steps.run(plan) == StepOutput(7, ())
    with two.step():
        steps.run(plan)
    assert told == [2, plan, 1, plan]
    # one whose threads cannot be changed is seen by the others all the same
    clock.now += 1
    fixed = ModelSteps(lambda given: StepOutput(threads(two), ()), lambda group, blocks: None, one)
    assert fixed.run(plan).step == 1


def test_a_slot_has_its_memory_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full tmpfs a write to a mapping without it would be a signal."""
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, begin, size: asked.append(size))
    with pytest.raises(ValueError, match="greater than file size"):
        CoreShare(tmp_path / "cores", WorkerId("one"), 2)
    assert asked

    def full(fd: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert open_share(tmp_path / "full", WorkerId("one"), 2) is None
    assert not list((tmp_path / "full").iterdir())


def test_a_second_close_closes_nobody_elses_file(tmp_path: Path, clock: Clock) -> None:
    """A worker stops its engine, and so does whatever started it."""
    one = share(tmp_path, "decode-1", 4, clock)
    one.close()
    with (tmp_path / "other").open("w") as other:
        one.close()
        other.write("still open")
    assert not list((tmp_path / "cores").iterdir())
