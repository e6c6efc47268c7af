"""Packed weights on disk: packed once, the same bits as in memory, and nothing about a file or folder is fatal."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.dispatch import choose
from kernels.native.arena import Arena, _huge_share
from shared.contracts.errors import SettingsError
from shared.model import pack_cache, pack_file, room
from shared.model.config import load_config
from shared.model.decoder import DTYPES, load_decoder
from shared.model.digest import model_digest
from shared.model.fetch import cache_dir
from shared.model.native_decoder import Kept, NativeDecoder
from shared.model.pack_cache import PackCache, in_huge_pages, new_arena
from shared.model.pack_file import Damaged, open_pack, write_pack
from shared.model.quantization import TensorParallel
from shared.model.weights import Weights
from tests.native import require_native
from tests.tiny_models import make_tiny_model

WHAT = {"model": "abc", "dtype": "float32"}
ROOT = Path(__file__).resolve().parents[2]


def lay_out(arena: Arena, value: float = 1.0) -> list[torch.Tensor]:
    """Two pieces, of which the second has a size of its own."""
    pieces = [arena.take(3000, torch.float32), arena.take(77, torch.bfloat16)]
    if not arena.filled:
        for number, piece in enumerate(pieces):
            piece.fill_(value + number)
    return pieces


def planned() -> Arena:
    plan = Arena.plan()
    lay_out(plan)
    return plan


def packs(folder: Path) -> PackCache:
    return PackCache(folder / "packed", least_bytes=0)


def values(arena: Arena | None) -> list[float]:
    assert arena is not None
    pieces = lay_out(arena)
    assert all((piece == piece[0]).all() for piece in pieces)
    return [float(piece[0]) for piece in pieces]


def never(arena: Arena) -> None:
    raise AssertionError("packed again")


def only_file(folder: Path) -> Path:
    (path,) = (folder / "packed").glob("*.pack")
    return path


# ------------------------------------------------------------------------------------------------------------- models


def load(folder: Path, dtype: str, kept: Path | None, with_head: bool = True) -> NativeDecoder:
    choice = choose("native", cache_dir(os.environ) / "kernels")
    assert choice.native is not None
    where = None if kept is None else Kept(packs(kept), model_digest(folder))
    config = load_config(folder)
    with Weights(folder, config) as weights:
        return NativeDecoder(
            config, weights, DTYPES[dtype], choice, choice.native, 2, TensorParallel(), with_head, where
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_kept_pack_is_what_would_be_packed_in_memory(tmp_path: Path, dtype: str, tied: bool) -> None:
    require_native()
    biases = {"attention_bias": True, "mlp_bias": True}
    folder = make_tiny_model(tmp_path / "tiny", num_hidden_layers=2, tie_word_embeddings=tied, vocab_size=333, **biases)
    memory = load(folder, dtype, None)
    first, second = load(folder, dtype, tmp_path), load(folder, dtype, tmp_path)
    headless = load(folder, dtype, tmp_path, with_head=False)
    expected = bytes(memory._arena.contents())
    assert any(expected)
    for decoder in (first, second):
        assert bytes(decoder._arena.contents()) == expected
    # who has no head shares the file of those who have one, and sees the same layers
    only_file(tmp_path)
    seen = bytes(headless._arena.contents())
    assert seen == expected[: len(seen)]
    assert len(seen) < len(expected)


def test_other_weights_or_dtypes_have_files_of_their_own(tmp_path: Path) -> None:
    require_native()
    for seed in (0, 1):
        folder = make_tiny_model(tmp_path / f"tiny{seed}", seed=seed, num_hidden_layers=1)
        for dtype in ("float32", "bfloat16"):
            load(folder, dtype, tmp_path)
    assert len(list((tmp_path / "packed").glob("*.pack"))) == 4


# ------------------------------------------------------------------------------------------------------------- folders


def test_packed_once(tmp_path: Path) -> None:
    assert values(packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)) == [1, 2]
    assert values(packs(tmp_path).arena(WHAT, "v1", planned(), never)) == [1, 2]
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o400
    # other weights are others
    other = packs(tmp_path).arena({**WHAT, "model": "xyz"}, "v1", planned(), lambda arena: lay_out(arena, 5))
    assert values(other) == [5, 6]


def test_little_is_not_kept(tmp_path: Path) -> None:
    assert PackCache(tmp_path / "packed").arena(WHAT, "v1", planned(), never) is None
    assert not (tmp_path / "packed").exists()


def test_one_packs_and_the_others_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    packed, waiting, found = [], threading.Event(), []

    def fill(arena: Arena) -> None:
        packed.append(1)
        waiting.wait(10)
        lay_out(arena)

    def work() -> None:
        found.append(packs(tmp_path).arena(WHAT, "v1", planned(), fill))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while caplog.text.count("waiting for another process that packs weights") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting.set()
    for thread in threads:
        thread.join(20)
    assert [values(arena) for arena in found] == [[1, 2]] * 4
    assert len(packed) == 1


def test_a_packer_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; import tests.unit.test_pack_cache as t\n"
        "def fill(arena):\n"
        "    (Path(sys.argv[1]) / 'packed' / '.tmp-1').write_bytes(b'half')\n"
        "    print('packing', flush=True); time.sleep(60)\n"
        "t.packs(Path(sys.argv[1])).arena(t.WHAT, 'v1', t.planned(), fill)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT) as packer:
        assert packer.stdout is not None
        assert packer.stdout.readline() == b"packing\n"
        packer.kill()
    assert values(packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)) == [1, 2]
    assert {path.suffix for path in (tmp_path / "packed").iterdir() if path.name != "lock"} == {".pack"}


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)

    return damage


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip(0), "does not begin as one"),
        (flip(29), "head is cut off"),
        (flip(33), "head cannot be read"),
        (flip(4096), "digest differs"),
        (flip(-1), "digest differs"),
        (cut(-1), "bytes instead of"),
        (cut(100), "head is cut off"),
        (cut(20), "head is cut off"),
        (cut(0), "head is cut off"),
        (lambda path: path.chmod(0o666), "written by others"),
    ],
)
def test_a_damaged_file_costs_a_line_and_is_packed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], why: str
) -> None:
    packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)
    damage(only_file(tmp_path))
    assert values(packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)) == [1, 2]
    (record,) = caplog.records
    assert why in record.getMessage()
    assert values(packs(tmp_path).arena(WHAT, "v1", planned(), never)) == [1, 2]


def test_a_file_with_other_contents_than_its_name_says_is_damaged(tmp_path: Path) -> None:
    arena, path = Arena(planned().used), tmp_path / "one.pack"
    lay_out(arena)
    write_pack(path, WHAT, arena)
    with pytest.raises(Damaged, match="other weights"):
        open_pack(path, {**WHAT, "dtype": "bfloat16"}, planned())
    plan = Arena.plan()
    plan.take(77, torch.bfloat16)
    with pytest.raises(Damaged, match="pieces lie elsewhere"):
        open_pack(path, WHAT, plan)
    assert open_pack(tmp_path / "none.pack", WHAT, plan) is None


def test_a_page_that_cannot_be_read_is_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)
    real = mmap.mmap

    class Faulty(real):  # type: ignore[misc, valid-type]
        def madvise(self, option: int, *where: int) -> None:
            if option == pack_file._POPULATE_READ:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    monkeypatch.setattr(mmap, "mmap", Faulty)
    with pytest.raises(Damaged, match="cannot be read"):
        open_pack(only_file(tmp_path), {**WHAT, "version": "v1"}, planned())


@pytest.mark.parametrize("kind", ["a file", "open to others"])
def test_a_folder_that_cannot_be_used_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    folder = tmp_path / "packed"
    if kind == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert packs(tmp_path).arena(WHAT, "v1", planned(), never) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"cannot keep packed weights in {folder}: ")


def test_a_full_disk_costs_a_line_and_packs_nobody_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = packs(tmp_path).arena({"model": "used"}, "v1", planned(), lay_out)
    for number in range(2):
        packs(tmp_path).arena({"model": str(number)}, "v1", planned(), lay_out)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert values(packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)) == [1, 2]
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    # the one in use is there, and nothing half written
    assert [path.name for path in (tmp_path / "packed").iterdir() if path.name != "lock"] == [only_file(tmp_path).name]
    assert values(used) == [1, 2]


def test_what_packing_raises_goes_through_and_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="packed again"):
        packs(tmp_path).arena(WHAT, "v1", planned(), never)
    assert not list((tmp_path / "packed").glob("*.pack"))


def test_packs_nobody_uses_go_oldest_first(tmp_path: Path) -> None:
    cache = packs(tmp_path)
    held = cache.arena({"model": "held"}, "v1", planned(), lay_out)
    for number in range(5):
        cache.arena({"model": str(number)}, "v1", planned(), lay_out)
    paths = sorted((tmp_path / "packed").glob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
    now = time.time()
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (now - age * 86400, now - age * 86400))
    size = paths[0].stat().st_size
    assert cache.prune(keep=paths[-1], keep_bytes=2 * size, keep_days=100) == 2
    # kept are the newest, two more, and the one that is mapped
    assert [path.exists() for path in paths] == [True, False, False, True, True, True]
    assert cache.prune(keep=paths[-1], keep_days=1.5) == 1
    assert cache.prune(keep=paths[-1], keep_days=1.5) == 0
    assert values(held) == [1, 2]
    del held


def test_using_a_pack_makes_it_young(tmp_path: Path) -> None:
    packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)
    os.utime(only_file(tmp_path), (1, 1))
    packs(tmp_path).arena(WHAT, "v1", planned(), never)
    assert time.time() - only_file(tmp_path).stat().st_mtime < 60


def test_a_newer_version_replaces_the_pack_of_the_same_weights(tmp_path: Path) -> None:
    cache, other = packs(tmp_path), {**WHAT, "model": "xyz"}
    cache.arena(other, "v1", planned(), lay_out)
    first = cache.arena(WHAT, "v1", planned(), lay_out)
    assert values(cache.arena(WHAT, "v2", planned(), lambda arena: lay_out(arena, 7))) == [7, 8]
    # the old one is in use yet
    assert values(first) == [1, 2]
    assert len(list((tmp_path / "packed").glob("*.pack"))) == 3
    del first
    assert values(cache.arena(WHAT, "v3", planned(), lambda arena: lay_out(arena, 9))) == [9, 10]
    left = sorted(path.stem.partition("-")[2] for path in (tmp_path / "packed").glob("*.pack"))
    assert left == ["v1", "v3"]
    assert values(cache.arena(other, "v1", planned(), never)) == [1, 2]


def test_weights_in_small_pages_are_copied_where_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapped = packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)
    assert mapped is not None
    size = planned().used
    monkeypatch.setattr(Arena, "is_huge", lambda arena, size: False)
    # nor would a copy be
    assert in_huge_pages(mapped, size) is mapped
    # it would
    monkeypatch.setattr(Arena, "is_huge", lambda arena, size: arena is not mapped)
    copy = in_huge_pages(mapped, size)
    assert copy is not mapped
    assert values(copy) == [1, 2]
    assert not caplog.records
    monkeypatch.setattr(pack_cache, "free_memory_bytes", lambda: size)
    assert in_huge_pages(mapped, size) is mapped
    assert "too little memory" in caplog.text
    monkeypatch.setattr(Arena, "is_huge", lambda arena, size: True)
    assert in_huge_pages(mapped, size) is mapped


@pytest.mark.parametrize("free", [0, 100_000])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    require_native()
    folder = make_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(room, "free_memory_bytes", lambda: free)
    for load_it in (
        lambda: load(folder, "float32", None),
        lambda: load(folder, "float32", tmp_path),
        lambda: load_decoder(folder, "float32", "torch"),
    ):
        with pytest.raises(SettingsError, match=r"weights take 0\.\d\d GiB of memory, of which 0\.00 GiB") as error:
            load_it()
        assert error.value.param == "model.path"


def test_the_system_may_refuse_memory_that_seems_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = packs(tmp_path).arena(WHAT, "v1", planned(), lay_out)
    assert mapped is not None
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1 << 62)
    with pytest.raises(SettingsError, match="weights take"):
        new_arena(1 << 60)

    def refuse(arena: Arena, size: int) -> Arena:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Arena, "is_huge", lambda arena, size: False)
    monkeypatch.setattr(Arena, "copied", refuse)
    assert in_huge_pages(mapped, planned().used) is mapped


def test_pages_of_memory_are_told_apart() -> None:
    size, setting = 16 * 2**20, Path("/sys/kernel/mm/transparent_hugepage/enabled")
    plain = mmap.mmap(-1, size)
    plain.madvise(mmap.MADV_NOHUGEPAGE)
    plain[:] = b"1" * size
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no huge pages on this machine")
    small = Arena.over(plain, 0)
    assert not small.is_huge(size)
    copy = small.copied(size)
    assert copy.filled
    memory = copy.take(size, torch.uint8)
    assert (memory == ord("1")).all()
    assert _huge_share(memory.data_ptr()) > 0  # how much depends on the memory that is free
