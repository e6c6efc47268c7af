"""The vocabulary of `simd.h` at every level: against numpy where numpy can say, and the same bits everywhere.

ARM is compiled for in every run and tried where an emulator is at hand.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.native.build import FLAGS, KERNELS, UNITS
from kernels.native.compiler import Compiler, find_compiler, find_zig, zig_compiler
from kernels.native.cpu import LEVELS, Level
from tests.native import ALL_LEVELS

PROBE = Path(__file__).with_name("simd_probe.c")
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-function")
ARM = [level for level in LEVELS if level.machine == "aarch64"]
NAN, ROUNDS, LANES = 0x7FC00000, 95, 16
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

ARITHMETIC = ("add", "sub", "mul", "divide", "fused", "fused_minus", "higher", "lower", "magnitude", "to_whole")
WORDS = ("add_words", "and_words", "or_words", "xor_words", "shift_left", "shift_right", "to_floats", "to_ints")
LOADS = ("load_part", "load_words_part", "load_bytes", "load_halves", "load_float16", "load_bfloat16")
SIZES = {
    **dict.fromkeys(ARITHMETIC, 16),
    **dict.fromkeys(("sum_lanes", "top_lane", "first_lane"), 1),
    "at_least": 2,
    **dict.fromkeys(("exponential", "exponential of 0 .. 511", "exponential of 0 .. -255"), 16),
    **dict.fromkeys((*WORDS, "wide_product", "wide_product high"), 16),
    "quads": 64,
    **dict.fromkeys(("dot_u8s8", "dot_u7s8"), 16),
    "transpose": 256,
    **dict.fromkeys((*LOADS, "keep", "higher_part"), 16),
    **dict.fromkeys(("store_part", "store_words_part", "store_bytes", "store_halves", "store_float16"), 32),
    **dict.fromkeys(("to_bfloat16", "add_pairs"), 16),
}
OWN_OF_BFLOAT16 = {"to_bfloat16", "add_pairs"}
"""What avx512_bf16 does otherwise: it takes the smallest numbers for zeros, and rounds products of pairs together."""


@pytest.fixture(scope="module")
def given() -> NDArray[np.uint8]:
    """[ROUNDS, 3, 64] bytes: any bits in odd rounds, floats of some size in even ones."""
    draw = np.random.default_rng(0)
    rounds = draw.integers(0, 256, (ROUNDS, 3, 64), dtype=np.uint8)
    some = (draw.standard_normal((ROUNDS, 3, LANES)) * 30).astype(np.float32)
    rounds[::2] = some.view(np.uint8)[::2]
    return rounds


def build(compiler: Compiler, level: Level, target: Path, *flags: str) -> Path:
    command = [*compiler.command, "-std=gnu11", "-O1", "-ffp-contract=off", *STRICT, *flags, *level.flags]
    subprocess.run([*command, f"-I{KERNELS}", str(PROBE), "-o", str(target), "-lm"], check=True, timeout=300)
    return target


def probed(command: list[str], given: NDArray[np.uint8]) -> dict[str, Words]:
    """[ROUNDS, size] words of every operation."""
    done = subprocess.run(command, input=given.tobytes(), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, (command, done.returncode, done.stderr[-2000:])
    out = np.frombuffer(done.stdout, dtype=np.uint32).reshape(ROUNDS, sum(SIZES.values()))
    ends = np.cumsum(list(SIZES.values()))
    return dict(zip(SIZES, np.split(out, ends[:-1], axis=1), strict=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, given: NDArray[np.uint8]) -> dict[str, dict[str, Words]]:
    """What the levels of this machine say."""
    compiler = find_compiler(os.environ)
    if compiler is None or ALL_LEVELS == ["none"]:
        pytest.skip("the native kernels cannot be built or run here")
    folder = tmp_path_factory.mktemp("probes")
    levels = [level for level in LEVELS if level.name in ALL_LEVELS]
    return {level.name: probed([str(build(compiler, level, folder / level.name))], given) for level in levels}


# ---------------------------------------------------------------------------------------------------- what numpy says


def bits(values: NDArray[Any]) -> Words:
    """A float's bits, all NaN alike."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return np.where(np.isnan(values), np.uint32(NAN), words)


def halved(values: Floats, join: Any) -> Floats:
    """Halves with halves, down to one lane."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = join(values[..., :half], values[..., half:])
    return values


def higher(a: Floats, b: Floats) -> Floats:
    return np.where(a > b, a, b)


def dots(sums: Words, u: NDArray[np.uint8], s: NDArray[np.uint8]) -> Words:
    products = u.astype(np.int64) * s.view(np.int8).astype(np.int64)
    total = sums.astype(np.int64) + products.reshape(ROUNDS, LANES, 4).sum(axis=2)
    return (total % 2**32).astype(np.uint32)


def transposed(a: Words, b: Words) -> Words:
    i = np.arange(LANES, dtype=np.uint32)[None, :, None]
    rows = np.where(i % 2 == 1, a[:, None, :], b[:, None, :]) + i
    return rows.transpose(0, 2, 1).reshape(ROUNDS, 256)


def edges(values: NDArray[Any], count: NDArray[np.int64]) -> Words:
    """The 128 bytes before the edge where the first `count` of a round's values were stored over 7s."""
    out = np.full((ROUNDS, 128), 7, dtype=np.uint8)
    for row, (line, n) in enumerate(zip(values, count, strict=True)):
        stored = line[:n].tobytes()
        if stored:
            out[row, -len(stored) :] = np.frombuffer(stored, dtype=np.uint8)
    return out.view(np.uint32)


def lane_bits(lanes: NDArray[np.bool_]) -> Words:
    return (lanes.astype(np.uint32) << np.arange(LANES, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)[:, None]


@cache
def no_warnings() -> None:
    np.seterr(all="ignore")


def expected(given: NDArray[np.uint8]) -> dict[str, Words]:
    no_warnings()
    a, b, c = (np.ascontiguousarray(given[:, i]).view(np.uint32) for i in range(3))
    x, y = a.view(np.float32), b.view(np.float32)
    count = np.clip(np.arange(ROUNDS) % (LANES + 3) - 1, 0, LANES)
    inside = np.arange(LANES)[None, :] < count[:, None]
    bytes_of, halves = a.view(np.uint8)[:, :LANES], a.view(np.uint16)[:, :LANES]
    upper = (halves.astype(np.uint32) << 16).view(np.float32)
    ints = a.view(np.int32)
    return {
        "add": bits(x + y),
        "sub": bits(x - y),
        "mul": bits(x * y),
        "divide": bits(x / y),
        "higher": bits(higher(x, y)),
        "lower": bits(np.where(x < y, x, y)),
        "magnitude": bits(np.abs(x)),
        "to_whole": bits(np.rint(x)),
        "sum_lanes": bits(halved(x, np.add)),
        "top_lane": bits(halved(x, higher)),
        "first_lane": bits(x[:, :1]),
        "add_words": a + b,
        "and_words": a & b,
        "or_words": a | b,
        "xor_words": a ^ b,
        "wide_product": a * b,
        "wide_product high": (a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)).astype(np.uint32),
        "quads": np.stack((a, b, c, a + b), axis=1).reshape(ROUNDS, 4, 4, 4).transpose(0, 3, 2, 1).reshape(ROUNDS, 64),
        "at_least": np.concatenate((lane_bits(x >= y), lane_bits(x >= x)), axis=1),
        "shift_left": a << np.uint32(5),
        "shift_right": a >> np.uint32(5),
        "to_floats": bits(ints.astype(np.float32)),
        "to_ints": np.rint(ints.astype(np.float32) * np.float32(0.37)).astype(np.int32).view(np.uint32),
        "dot_u8s8": dots(c, a.view(np.uint8), b.view(np.uint8)),
        "dot_u7s8": dots(c, a.view(np.uint8) & 0x7F, b.view(np.uint8)),
        "transpose": transposed(a, b),
        "load_part": bits(np.where(inside, x, 0)),
        "load_words_part": np.where(inside, a, 0),
        "load_bytes": np.where(inside, bytes_of.view(np.int8).astype(np.int32).view(np.uint32), 0),
        "load_halves": np.where(inside, halves.astype(np.uint32), 0),
        "load_float16": bits(np.where(inside, halves.view(np.float16).astype(np.float32), 0)),
        "load_bfloat16": bits(np.where(inside, upper, 0)),
        "keep": bits(np.where(inside, x, 0)),
        "higher_part": bits(np.where(inside, higher(np.full_like(x, 0.5), x), np.float32(0.5))),
        "store_part": edges(a, count),
        "store_words_part": edges(a, count),
        "store_bytes": edges(np.clip(ints, -128, 127).astype(np.int8), count),
        "store_halves": edges((a & 0xFFFF).astype(np.uint16), count),
        "store_float16": edges((a & 0xFF7FFFFF).view(np.float32).astype(np.float16), count),
    }


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_the_vocabulary_means_what_it_says(
    made: dict[str, dict[str, Words]], given: NDArray[np.uint8], level: str
) -> None:
    for name, words in expected(given).items():
        np.testing.assert_array_equal(made[level][name], words, err_msg=name)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_what_is_not_exact_is_close(made: dict[str, dict[str, Words]], given: NDArray[np.uint8], level: str) -> None:
    no_warnings()
    a, b, c = (np.ascontiguousarray(given[::2, i]).view(np.float32).astype(np.float64) for i in range(3))
    b_bits = np.ascontiguousarray(given[::2, 1]).view(np.uint32)
    exact = {
        "fused": a * b + c,
        "fused_minus": c - a * b,
        "exponential": np.exp(np.minimum(a, 88)),
        "exponential of 0 .. 511": np.exp((b_bits >> 23).astype(np.float64)),
        "exponential of 0 .. -255": np.exp(-(b_bits >> 24).astype(np.float64)),
    }
    for name, values in exact.items():
        got = np.ascontiguousarray(made[level][name][::2]).view(np.float32)
        right = np.where(values > np.finfo(np.float32).max, np.inf, values)
        wanted = a < 88 if name == "exponential" else np.ones_like(a, dtype=bool)
        np.testing.assert_allclose(got[wanted], right[wanted], rtol=2e-7, atol=2e-45, err_msg=name)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_bfloat16_is_rounded_to_even(made: dict[str, dict[str, Words]], given: NDArray[np.uint8], level: str) -> None:
    a = np.ascontiguousarray(given[:, 0]).view(np.uint32)
    values = a.view(np.float32)
    up = ((a.astype(np.uint64) + 0x7FFF + ((a >> 16) & 1)) >> 16).astype(np.uint32)
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    got = made[level]["to_bfloat16"]
    np.testing.assert_array_equal(got[~np.isnan(values) & ~tiny], up[~np.isnan(values) & ~tiny])
    assert np.isnan((got << np.uint32(16)).view(np.float32)[np.isnan(values)]).all()


def test_all_levels_give_the_same_bits(made: dict[str, dict[str, Words]]) -> None:
    first = made[ALL_LEVELS[-1]]
    for level, results in made.items():
        for name, words in results.items():
            if level != "avx512_bf16" or name not in OWN_OF_BFLOAT16:
                np.testing.assert_array_equal(words, first[name], err_msg=f"{level}: {name}")


# ---------------------------------------------------------------------------------------------------------------- ARM


def arm_frontend() -> list[str] | None:
    """A compiler for ARM that need not link: the system's, or zig's clang without zig, which would build a libc."""
    if path := shutil.which("aarch64-linux-gnu-gcc"):
        return [path]
    if (zig := find_zig(None)) is None:
        return None
    folders = ("aarch64-linux-musl", "generic-musl", "aarch64-linux-any", "any-linux-any")
    lib = zig.parent / "lib"
    headers = [lib / "include", *(lib / "libc" / "include" / folder for folder in folders)]
    return [str(zig), "clang", "-target", folders[0], "-nostdinc", *(f"-isystem{header}" for header in headers)]


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_it_compiles_for_arm(tmp_path: Path, level: Level) -> None:
    compiler = arm_frontend()
    if compiler is None:
        pytest.skip("no compiler for 64-bit ARM: pip install ziglang")
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-shared", "-pthread")]
    command = [*compiler, *flags, *level.flags, *STRICT, f"-I{KERNELS}"]
    jobs = [["-fsyntax-only", str(KERNELS / "native" / name)] for name in UNITS]
    jobs.append(["-O1", "-c", str(PROBE), "-o", str(tmp_path / "probe.o")])
    for job in jobs:
        done = subprocess.run([*command, *job], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (job, done.stderr[-3000:])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_arm_gives_the_same_bits(
    tmp_path: Path, made: dict[str, dict[str, Words]], given: NDArray[np.uint8], level: Level
) -> None:
    emulator, zig = shutil.which("qemu-aarch64"), find_zig(None)
    compiler = zig_compiler(zig, "aarch64-linux-musl", os.environ) if zig else None
    if platform.machine() == "aarch64" or emulator is None or compiler is None:
        pytest.skip("no emulator of 64-bit ARM (qemu-user), or no compiler for it (ziglang)")
    results = probed([emulator, str(build(compiler, level, tmp_path / "probe", "-static"))], given)
    for name, words in results.items():
        np.testing.assert_array_equal(words, made[ALL_LEVELS[-1]][name], err_msg=name)
