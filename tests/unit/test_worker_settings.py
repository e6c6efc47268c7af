"""Settings of the engine reach the worker's batcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.contracts.parts import ItlTarget
from shared.engine.batcher_config import BatcherConfig
from shared.engine.cores import usable_cores
from shared.engine.prompt_budget import AUTO_TARGET, NO_TARGET
from shared.engine.worker_engine import open_worker_engine
from shared.engine.worker_settings import worker_options
from shared.settings.load import load_settings


def batcher_config(folder: Path, role: str, **engine: str) -> BatcherConfig:
    """Of a fake worker with these settings, given as flags are."""
    flags = {"workers.fake": True, "kv.dir": str(folder), "kv.pool_bytes": "65536"}
    flags |= {f"engine.{name}": value for name, value in engine.items()}
    settings = load_settings(flags, {}, None).settings
    core = open_worker_engine(worker_options(settings, role, {}), WorkerId(f"{role}-1"))
    try:
        config: BatcherConfig = core.engine._batcher.config
        return config
    finally:
        core.stop(1.0)


def test_every_setting_of_the_step_loop_arrives(tmp_path: Path) -> None:
    config = batcher_config(
        tmp_path,
        "decode",
        token_budget="99",
        chunk_size="17",
        max_sequences="7",
        depth="0",
        batching="dynamic",
        batch_size="5",
        batch_window_s="0.25",
        itl_target_ms="40",
        prefill_token_budget="300",
    )
    assert (config.token_budget, config.chunk_size, config.max_num_seqs, config.depth) == (99, 17, 7, 0)
    assert (config.batching, config.batch_size, config.batch_window_s) == ("dynamic", 5, 0.25)
    assert (config.itl_target, config.lone_token_budget) == (ItlTarget(least_s=0.04), 300)


def test_defaults_are_the_batcher_s_and_prefill_has_a_budget_of_its_own(tmp_path: Path) -> None:
    config, plain = batcher_config(tmp_path, "prefill"), BatcherConfig()
    assert (config.token_budget, config.itl_target) == (512, NO_TARGET)
    assert batcher_config(tmp_path, "decode").itl_target == AUTO_TARGET
    assert batcher_config(tmp_path, "decode", itl_target_ms="0").itl_target == NO_TARGET
    assert (config.batching, config.chunk_size, config.depth) == (plain.batching, plain.chunk_size, plain.depth)
    assert (config.batch_size, config.batch_window_s) == (plain.batch_size, plain.batch_window_s)


def test_how_blocks_are_given_up_arrives_at_the_pool(tmp_path: Path) -> None:
    flags = {"workers.fake": True, "kv.dir": str(tmp_path), "kv.pool_bytes": "65536"}
    for given, eviction in (({}, "reuse"), ({"kv.eviction": "recency"}, "recency")):
        settings = load_settings(flags | given, {}, None).settings
        core = open_worker_engine(worker_options(settings, "decode", {}), WorkerId("decode-1"))
        try:
            assert [group.eviction for group in core.engine._batcher.pool.groups] == [eviction]
        finally:
            core.stop(1.0)
    with pytest.raises(SettingsError, match=r"kv\.eviction"):
        load_settings({"kv.eviction": "best"}, {}, None)


@pytest.mark.parametrize(
    ("interval", "target", "seconds"),
    [
        ("30", "auto", 0.03),
        ("100", "auto", 0.1),
        ("30", "20", 0.02),
        ("30", "50", 0.03),
        ("100", "0", 0.1),
        ("0", "20", 0.0),
    ],
)
def test_tokens_are_gathered_for_no_longer_than_a_step_may_take(interval: str, target: str, seconds: float) -> None:
    flags = {"engine.publish_interval_ms": interval, "engine.itl_target_ms": target}
    options = worker_options(load_settings(flags, {}, None).settings, "decode", {})
    assert options.publish_interval_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batching", "best"),
        ("publish_interval_ms", "-1"),
        ("batch_size", "0"),
        ("batch_window_s", "-1"),
        ("chunk_size", "-1"),
        ("itl_target_ms", "-1"),
        ("itl_target_ms", "soon"),
    ],
)
def test_a_setting_that_means_nothing_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"engine.{name}"):
        batcher_config(tmp_path, "decode", **{name: value})


def test_native_kernels_may_use_all_cores_and_torch_its_part() -> None:
    def threads(env: dict[str, str], **flags: object) -> tuple[int, int, int]:
        settings = load_settings({f"engine.{name}": value for name, value in flags.items()}, {}, None).settings
        options = worker_options(settings, "decode", env)
        return options.threads, options.most_threads, options.cores

    cores = usable_cores()
    # a prefill and a decode worker
    assert threads({}) == (max(1, cores // 2), cores, cores)
    # the supervisor counts the workers of all models
    assert threads({"OMP_NUM_THREADS": "3"}) == (3, cores, cores)
    assert threads({"OMP_NUM_THREADS": "3"}, threads=1) == (1, 1, cores)
    assert threads({"OMP_NUM_THREADS": "many"}) == threads({}) == threads({"OMP_NUM_THREADS": "0"}, threads=0)
