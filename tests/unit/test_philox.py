"""Philox against the published vectors, and our noise against its committed golden values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kernels.sampling import gumbel, gumbel_all, uniform
from kernels.sampling.philox import philox4x32

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling_noise.json"

# Random123's kat_vectors, philox 4x32, 10 rounds
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_random123_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    words = philox4x32((c0, c1, c2, c3), key)
    assert tuple(int(word[0]) for word in words) == expected


def test_golden_noise() -> None:
    for case in json.loads(GOLDEN.read_text()):
        ids = np.array(case["token_ids"])
        seed, position = int(case["seed"]), int(case["position"])
        assert uniform(seed, position, ids).tolist() == case["uniform"]
        # the noise goes through libm's log: one unit in the last place of float32 is allowed
        np.testing.assert_allclose(gumbel(seed, position, ids), np.float32(case["gumbel"]), rtol=1.2e-7, atol=0)


def test_some_ids_get_the_same_noise_as_all() -> None:
    ids = np.array([0, 1, 2, 3, 4, 997, 998])
    assert gumbel_all(7, 11, 999)[ids].tolist() == gumbel(7, 11, ids).tolist()


def test_every_part_of_the_address_matters() -> None:
    ids = np.arange(64)
    base = gumbel(1, 2, ids).tolist()
    for seed, position in [(2, 2), (1, 3), (1 + (1 << 32), 2), (1, 2 + (1 << 32))]:
        assert gumbel(seed, position, ids).tolist() != base


def test_noise_is_gumbel() -> None:
    noise = np.concatenate([gumbel_all(3, position, 50_000) for position in range(4)])
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    assert np.isfinite(noise).all()
