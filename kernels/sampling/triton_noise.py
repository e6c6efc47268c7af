"""The noise of `kernels.sampling.noise` on the device: the same words, the same floats but for a last bit of a log."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_words(seed, position, first_id, BLOCK: tl.constexpr):
    """The words of BLOCK token ids from `first_id`, a multiple of 4 (kernels/sampling/noise.py): [BLOCK] uint32."""
    group = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    low = position.to(tl.uint32) + group * 0
    high = (position >> 32).to(tl.uint32) + group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, group * 0)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel_noise(words):
    """The noise of words, as float32."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def rough_noise(words):
    """The noise within 1e-4, without float64: near 1, where a uniform has no bits left, from what it lacks to 1."""
    lacking = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = lacking * (1.0 + lacking * (0.5 + lacking * (0.3333333 + lacking * 0.25)))
    return -tl.log(tl.where(lacking < 0.0625, series, -tl.log(uniform)))
