"""What a client asked of sampling, as it crosses the bus and enters the engine."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of one choice. Checked by `shared/ingress` before it is built; the engine trusts it.

    temperature 0 is greedy. top_k 0 and top_p 1 switch those filters off. `seed` is the 64-bit seed, minted by
    the gateway when the client gave none: the Gumbel noise is a pure function of (seed, absolute position, token id).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
