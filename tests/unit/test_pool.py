from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.contracts.errors import SettingsError, Unavailable
from shared.contracts.ids import WorkerId
from shared.kv import huge_pages
from shared.kv import pool as pool_module
from shared.kv.huge_pages import HUGE_PAGE
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.kv.pool_file import sweep, told, wiped
from shared.kv.transfer import PeerPool, owner_lives

FULL = LayerGroup("full", (0, 2), num_kv_heads=2, head_dim=4, block_size=16, dtype="float32")
WINDOW = LayerGroup("window", (1,), num_kv_heads=1, head_dim=8, block_size=32, dtype="bfloat16", sliding_window=64)
LAYOUT = PoolLayout((FULL, WINDOW), (3, 5))
WORKER = WorkerId("decode-0a1b")


def make(folder: Path) -> Pool:
    return create_pool(folder, WORKER, LAYOUT)


def test_views_and_spans_are_the_same_bytes(tmp_path: Path) -> None:
    with make(tmp_path) as pool:
        full, window = pool.views()
        assert full.shape == (3, 2, 2, 2, 16, 4)
        assert window.shape == (5, 1, 2, 1, 32, 8)
        assert window.dtype == torch.bfloat16
        full[2] = 1.5
        window[4] = -2.0
        assert torch.frombuffer(pool.span(0, 2), dtype=torch.float32).eq(1.5).all()
        assert torch.frombuffer(pool.span(1, 4), dtype=torch.bfloat16).eq(-2.0).all()
        assert not any(pool.span(0, 1))
        assert len(pool.span(1, 0)) == WINDOW.span_bytes


def test_a_span_outside_the_pool_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as pool, pytest.raises(IndexError):
        pool.span(1, 5)


def test_zero_blocks_overwrites_only_those(tmp_path: Path) -> None:
    with make(tmp_path) as pool:
        (full, _) = pool.views()
        full.fill_(7.0)
        pool.zero_blocks(0, [0, 2])
        assert full.amax(dim=(1, 2, 3, 4, 5)).tolist() == [0.0, 7.0, 0.0]


def test_all_bytes_are_allocated_and_private(tmp_path: Path) -> None:
    with make(tmp_path) as pool:
        stat = pool.path.stat()
        assert stat.st_size == LAYOUT.total_bytes
        assert stat.st_blocks * 512 >= LAYOUT.total_bytes
        assert stat.st_mode & 0o777 == 0o600
        assert [path.name for path in tmp_path.iterdir()] == ["decode-0a1b.kvpool"]


def test_close_unlinks_and_is_idempotent(tmp_path: Path) -> None:
    pool = make(tmp_path)
    view = pool.views()[0]
    pool.close()
    pool.close()
    assert list(tmp_path.iterdir()) == []
    view.fill_(1.0)  # a view outlives the file: no signal


def test_a_peer_reads_what_the_owner_wrote_and_cannot_write(tmp_path: Path) -> None:
    with make(tmp_path) as pool:
        peer = PeerPool(tmp_path, pool.path.name, LAYOUT)
        pool.views()[1][3] = 3.0
        assert bytes(peer.span(1, 3)) == bytes(pool.span(1, 3))
        with pytest.raises(TypeError):
            peer.span(1, 3)[0] = 1
        peer.close()


def test_a_peer_refuses_a_missing_or_foreign_pool(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        PeerPool(tmp_path, "gone.kvpool", LAYOUT)
    with make(tmp_path) as pool, pytest.raises(Unavailable, match="bytes"):
        PeerPool(tmp_path, pool.path.name, PoolLayout((FULL,), (3,)))


@pytest.mark.parametrize("held", [False, True])
def test_a_sweep_that_meets_a_pool_before_its_lock_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Another worker starts: it removes the file, or has just locked it to do so."""
    others: list[int] = []
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        if held:
            (path,) = tmp_path.iterdir()
            others.append(os.open(path, os.O_RDWR))
            lock(others[0], fcntl.LOCK_EX)
        else:
            assert len(sweep(tmp_path)) == 1
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with make(tmp_path) as pool:
        assert owner_lives(tmp_path, pool.path.name)
        assert pool.path in tmp_path.iterdir()
    for fd in others:
        os.close(fd)


def test_sweep_spares_owned_pools_and_wipes_the_rest(tmp_path: Path) -> None:
    orphan = tmp_path / "prefill-dead.kvpool"
    orphan.write_bytes(b"secret" * 1000)
    half_made = tmp_path / ".tmp-12.kvpool"
    half_made.write_bytes(b"secret")
    kept_open = orphan.open("rb")
    with make(tmp_path) as pool:
        assert owner_lives(tmp_path, pool.path.name)
        assert not owner_lives(tmp_path, orphan.name)
        assert sweep(tmp_path) == [half_made, orphan]
        assert pool.path.exists()
    assert not any(kept_open.read())
    kept_open.close()
    # and a mark of it stays until policy was told, also for a process that begins later
    assert sweep(tmp_path) == []
    assert wiped(tmp_path) == ("prefill-dead",)
    told(tmp_path, wiped(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_pool import make;"
        "p = make(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    path = tmp_path / "decode-0a1b.kvpool"
    assert owner_lives(tmp_path, path.name)
    assert sweep(tmp_path) == []
    child.kill()
    child.communicate()
    assert not owner_lives(tmp_path, path.name)
    assert sweep(tmp_path) == [path]


def test_a_full_folder_is_a_settings_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pool_module.os, "posix_fallocate", no_space)
    with pytest.raises(SettingsError, match="bytes but"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_folder_is_a_settings_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(SettingsError):
        make(blocker)


def test_the_owner_holds_the_lock_through_its_own_descriptor(tmp_path: Path) -> None:
    with make(tmp_path) as pool:
        fd = os.open(pool.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(fd)


def test_a_pool_lies_at_a_huge_page_and_says_how_much_of_it_is_in_some(tmp_path: Path) -> None:
    group = LayerGroup("full", (0,), num_kv_heads=1, head_dim=64, block_size=32, dtype="float32")
    layout = PoolLayout((group,), (300,))  # 4.7 MiB: two huge pages and a rest
    with create_pool(tmp_path, WORKER, layout) as pool:
        (view,) = pool.views()
        assert view.data_ptr() % HUGE_PAGE == 0
        view[299] = 3.0
        assert torch.frombuffer(pool.span(0, 299), dtype=torch.float32).eq(3.0).all()
        assert not any(pool.span(0, 298))
        assert pool.huge_bytes in (0, 2 * HUGE_PAGE)


def test_a_kernel_that_refuses_huge_pages_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size: int, advice: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(huge_pages, "_advise", refuse)
    with make(tmp_path) as pool:
        assert pool.huge_bytes == 0
        pool.views()[0].fill_(1.0)


def test_a_system_that_sets_no_addresses_aside_maps_the_pool_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_set_aside", lambda size: None)
    with make(tmp_path) as pool:
        pool.views()[0][2] = 1.5
        assert torch.frombuffer(pool.span(0, 2), dtype=torch.float32).eq(1.5).all()


def test_a_machine_that_takes_long_is_asked_for_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda address, size, advice: asked.append(size))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 3 * HUGE_PAGE)
    mapping = huge_pages.HugeMapping(fd, 3 * HUGE_PAGE)
    assert mapping.collapse(longest_s=-1.0) == 0
    assert mapping.collapse() == 3 * HUGE_PAGE
    assert asked == [3 * HUGE_PAGE, 3 * HUGE_PAGE, 3 * HUGE_PAGE]  # twice in advance, once to gather
    mapping.close()
    os.close(fd)
