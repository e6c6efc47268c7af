"""Gumbel noise as a pure function of (seed, absolute position, token id).

Layout, fixed for good:

- key: the 64-bit seed, low word first;
- counter: (token id // 4, position low word, position high word, `STREAM_SAMPLE`);
- the token's word is word `token id % 4` of the four that Philox gives.

`position` is the absolute position of the token being drawn: n for the first token after a prompt of n.
Words become uniforms `(word + 0.5) / 2^32`, open at both ends, and Gumbel noise `-log(-log(u))`, both in
float64; the noise is then rounded to float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.sampling.philox import Words, philox4x32

STREAM_SAMPLE = 0
"""Fourth counter word; other uses of randomness take other numbers."""
NOISE_MIN = -3.2
NOISE_MAX = 23.0
"""Bounds of the noise of a 32-bit word: -log(-log(2^-33)) and -log(-log(1 - 2^-33)), a little widened."""

_LOW = 0xFFFFFFFF
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def gumbel_all(seed: int, position: int, vocab_size: int) -> Floats:
    """Noise of every token id: [vocab_size] float32."""
    groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    words = np.stack(_words(seed, position, groups), axis=1).reshape(-1)[:vocab_size]
    return _gumbel(words)


def gumbel(seed: int, position: int, token_ids: Ids) -> Floats:
    """Noise of some token ids: [len(token_ids)] float32, the same values `gumbel_all` gives them."""
    return _gumbel(_pick(seed, position, token_ids))


def uniform(seed: int, position: int, token_ids: Ids) -> npt.NDArray[np.float64]:
    """The uniforms behind the noise, in (0, 1)."""
    return _uniform(_pick(seed, position, token_ids))


def _pick(seed: int, position: int, token_ids: Ids) -> Words:
    ids = token_ids.astype(np.uint64)
    words = _words(seed, position, ids >> np.uint64(2))
    return np.choose(token_ids & 3, words)


def _words(seed: int, position: int, groups: Words) -> tuple[Words, Words, Words, Words]:
    low, high, stream = (np.uint64(x) for x in (position & _LOW, position >> 32, STREAM_SAMPLE))
    counter = (groups, np.full_like(groups, low), np.full_like(groups, high), np.full_like(groups, stream))
    return philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))


def _uniform(words: Words) -> npt.NDArray[np.float64]:
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def _gumbel(words: Words) -> Floats:
    return (-np.log(-np.log(_uniform(words)))).astype(np.float32)
