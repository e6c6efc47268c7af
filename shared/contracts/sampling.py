"""What a client asked of sampling, as it crosses the bus and enters the engine."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of one choice. Checked by `shared/ingress` before it is built; the engine trusts it.

    temperature 0 is greedy. top_k 0 and top_p 1 switch those filters off. `seed` is the 64-bit seed, minted by
    the gateway when the client gave none: the Gumbel noise is a pure function of (seed, absolute position, token id).

    Penalties look at the output so far, `repetition_penalty` at the prompt too; all of it is known to whoever has the
    tokens, so a request that moves to another worker goes on alike.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0  # share of the best token's probability below which a token is dropped; 0 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_tokens: int = 0  # so many tokens come before one that ends the choice
    stop_token_ids: tuple[int, ...] = ()  # end the choice with `stop`, as an end-of-sequence token does
    logprobs: int = -1  # of each output token: -1 = none, n = its own and those of the n most likely
    prompt_logprobs: int = -1  # the same of the prompt's tokens but the first
    grammar: str = ""  # the output keeps to it, from its first token on; as `shared.grammar` writes them
    prediction: bytes = b""  # token ids (u32 LE) that the output may turn out to be: guesses, which change no draw
    open_ended: bool = False  # nobody asked for `max_tokens`: it is less where a worker's whole pool holds less

    @property
    def looks_back(self) -> bool:
        """True when earlier tokens have a say in the draw."""
        return self.penalizes or bool(self.grammar)

    @property
    def penalizes(self) -> bool:
        """True when tokens that came before lose or gain by it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts(self) -> bool:
        """True when logits are changed before the draw."""
        return bool(self.looks_back or self.logit_bias or self.min_tokens)
