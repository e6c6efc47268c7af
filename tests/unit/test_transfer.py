"""Shared-memory pulls: only plain pool files, bytes checked where they land, tails zeroed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from kernels.tile_layouts import LANES16
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Unavailable
from shared.contracts.ids import BlockGeneration, Dispatch, Epoch, Incarnation, RequestId, WorkerId
from shared.contracts.parts import BlockRef
from shared.engine.worker_fake import FakePool
from shared.kv.handoff import Pull, PullItem
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.pool import pool_views
from shared.kv.transfer import PeerPool, SharedMemoryTransport, digest_blocks, owner_lives, zero_rest
from tests.native import scales_of, token_at

GROUPS = (LayerGroup("full", (0, 1), 2, 4, 8, "float32"),)
ATTEMPT = Attempt(RequestId("req-a"), Epoch(1), Dispatch(1))
SOURCE = WorkerId("prefill-1")


def make_pool(folder: Path, worker: str, blocks: int) -> FakePool:
    return FakePool(folder, WorkerId(worker), PoolLayout(GROUPS, (blocks,)))


def fill(span: memoryview, mark: int) -> None:
    span[:] = bytes((mark + i) % 251 + 1 for i in range(len(span)))


def pull_of(pool: FakePool, block: int, valid: int = 8, *, position: int = 0, incarnation: int = 1) -> Pull:
    (digest,) = digest_blocks(pool.span, ATTEMPT, [(0, block, 5, position)])
    item = PullItem(0, position, BlockRef(block, BlockGeneration(5), digest), valid)
    return Pull(1, ATTEMPT, SOURCE, Incarnation(incarnation), pool.path.name, (item,))


def test_a_block_arrives_whole(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    fill(source.span(0, 4), 3)
    result = transport.pull(pull_of(source, 4), [[2]], ())
    assert (result.bad, result.error, result.num_bytes) == ((), "", GROUPS[0].span_bytes)
    assert bytes(own.span(0, 2)) == bytes(source.span(0, 4))
    assert not any(own.span(0, 1))
    transport.close()


def test_a_changed_source_is_a_mismatch(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    fill(source.span(0, 4), 3)
    pull = pull_of(source, 4)
    source.span(0, 4)[100] ^= 1
    assert transport.pull(pull, [[2]], (6,)).bad == ((0, 0),)
    transport.close()


def test_a_block_outside_the_pool_is_a_mismatch(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    item = PullItem(0, 0, BlockRef(6, BlockGeneration(5), b"x" * 16), 8)
    pull = Pull(1, ATTEMPT, SOURCE, Incarnation(1), source.path.name, (item,))
    assert transport.pull(pull, [[2]], (6,)).bad == ((0, 0),)
    transport.close()


def test_the_rest_of_a_tail_is_zero(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    fill(source.span(0, 4), 3)
    zero_rest(source.span(0, 4), GROUPS[0], 3)
    fill(own.span(0, 2), 9)
    assert transport.pull(pull_of(source, 4, valid=3), [[2]], ()).bad == ()
    row, tile = 16, 128
    for start in range(0, GROUPS[0].span_bytes, tile):
        assert all(own.span(0, 2)[start : start + 3 * row])
        assert not any(own.span(0, 2)[start + 3 * row : start + tile])
    fill(source.span(0, 4), 3)
    assert transport.pull(pull_of(source, 4, valid=3), [[2]], ()).bad == ((0, 0),), "residue was not part of the deal"
    transport.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_the_rest_of_a_tail_is_zero_where_kernels_lay_tokens_side_by_side(dtype: str) -> None:
    group = LayerGroup("full", (0, 1), 2, 4, 32, dtype, tile_layout=LANES16)
    pool = torch.ones(1, 2, 2, 2, 32, 4, dtype=getattr(torch, dtype))
    zero_rest(memoryview(pool.view(torch.uint8).numpy()).cast("B"), group, 19)
    for layer, token in itertools.product(range(2), range(32)):
        for part in token_at(pool[:, layer:], 0, token):
            assert torch.equal(part, torch.full_like(part, float(token < 19))), (layer, token)


def test_an_unknown_tile_layout_is_refused() -> None:
    group = LayerGroup("full", (0,), 1, 4, 32, "bfloat16", tile_layout="columns")
    with pytest.raises(ValueError, match="columns"):
        zero_rest(memoryview(bytearray(group.span_bytes)), group, 3)


def test_the_rest_of_a_tail_of_integers_is_zeroed_with_its_scales() -> None:
    group = LayerGroup("full", (0, 1), 2, 8, 32, "int8", LANES16)
    layout = PoolLayout((group,), (1,))
    data = torch.full((layout.total_bytes,), 0x11, dtype=torch.uint8)
    (pool,) = pool_views(data, layout)
    scales = scales_of(pool)
    scales.fill_(0.5)
    zero_rest(memoryview(data.numpy()), group, 19)
    assert scales[..., :19].eq(0.5).all()
    assert not scales[..., 19:].any()
    for token in range(32):
        for part in token_at(pool, 0, token):
            assert bool(part.all()) == bool(part.any()) == (token < 19)
    assert int((data[: group.tiles_bytes] == 0x11).sum()) == group.tiles_bytes * 19 // 32


def test_a_new_incarnation_is_mapped_anew(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    fill(source.span(0, 4), 3)
    assert transport.pull(pull_of(source, 4), [[2]], ()).bad == ()
    source.close()
    again = make_pool(tmp_path, "prefill-1", 8)
    fill(again.span(0, 7), 40)
    assert transport.pull(pull_of(again, 7, incarnation=2), [[1]], ()).bad == ()
    transport.close()


def mapped(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_peers_that_are_gone_give_their_memory_back(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    pull = pull_of(source, 4)
    before = mapped(tmp_path)
    transport.pull(pull, [[2]], ())
    transport.drop_dead()
    assert mapped(tmp_path) == before + 1
    source.close()
    transport.drop_dead()
    assert mapped(tmp_path) == before
    assert "pool_unreadable" in transport.pull(pull, [[2]], ()).error
    transport.close()


def test_another_size_than_the_layout_is_an_error(tmp_path: Path) -> None:
    source, own = make_pool(tmp_path, "prefill-1", 6), make_pool(tmp_path, "decode-1", 3)
    transport = SharedMemoryTransport(tmp_path, GROUPS, own.span)
    assert "bytes" in transport.pull(pull_of(source, 4), [[2]], (7,)).error


@pytest.mark.parametrize("name", ["../x.kvpool", "/etc/passwd", "a/b.kvpool", "x.pool", "", ".kvpool", "UP.kvpool"])
def test_only_plain_names_are_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unavailable):
        PeerPool(tmp_path, name, PoolLayout(GROUPS, (1,)))
    assert not owner_lives(tmp_path, name)


def test_links_and_folders_are_not_followed(tmp_path: Path) -> None:
    real = make_pool(tmp_path, "prefill-1", 1)
    (tmp_path / "link.kvpool").symlink_to(real.path)
    (tmp_path / "folder.kvpool").mkdir()
    os.mkfifo(tmp_path / "fifo.kvpool")
    for name in ("link.kvpool", "folder.kvpool", "fifo.kvpool"):
        with pytest.raises(Unavailable):
            PeerPool(tmp_path, name, PoolLayout(GROUPS, (1,)))


def test_the_lock_tells_whether_the_owner_lives(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, "prefill-1", 1)
    name = pool.path.name
    assert owner_lives(tmp_path, name)
    copy = tmp_path / "prefill-2.kvpool"
    copy.write_bytes(pool.path.read_bytes())
    assert not owner_lives(tmp_path, copy.name)
    pool.close()
    assert not owner_lives(tmp_path, name)
