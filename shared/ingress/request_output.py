"""The outputs of all choices of one request, kept until they are taken, and how much that is."""

from __future__ import annotations

from collections.abc import Sequence

from shared.contracts.logprobs import unpack_logprobs
from shared.ingress.choice_output import Piece, make_echo, new_output
from shared.ingress.request_plan import RequestPlan
from shared.text.stream_effects import Commit
from shared.text.tokenizer import Tokenizer

_CHUNK_BYTES = 256  # of a delta's JSON around its text
_SCORE_JSON = 8  # how much longer log-probabilities are as JSON


class RequestOutput:
    """What a client is still to be sent."""

    def __init__(self, plan: RequestPlan, tokenizer: Tokenizer) -> None:
        self.unsent_bytes = 0
        """About how much would be sent of what was not taken yet."""
        self._plan = plan
        self._tokenizer = tokenizer
        self._choices = [new_output(i, plan, tokenizer) for i in range(plan.n)]
        self._held_bytes = 0  # of scores whose text has not come yet
        if plan.echo is not None and plan.sampling.prompt_logprobs < 0:
            self._begin(b"")

    @property
    def thought_tokens(self) -> int:
        """Tokens of thoughts over all choices, as far as they were taken."""
        return sum(choice.thought_tokens for choice in self._choices)

    def push(self, choice: int, token_ids: Sequence[int]) -> int | None:
        """New tokens of a choice, before they are committed; how many it keeps in all if a stop string is complete."""
        return self._choices[choice].text.push(token_ids)

    def commit(self, effect: Commit) -> bool:
        """Pushed tokens are the client's. True when there is something to send."""
        ids = effect.token_ids
        if effect.logprobs:
            self._choices[effect.choice].score(ids, unpack_logprobs(effect.logprobs, len(ids)))
            self._held_bytes += _SCORE_JSON * len(effect.logprobs)
        if effect.prompt_logprobs:
            self._begin(effect.prompt_logprobs)
        return self._collect(effect.choice)

    def end(self, choice: int, finish: str) -> None:
        """A choice has ended: what of its text was held back comes too."""
        self._choices[choice].text.finish()
        self._collect(choice)
        self._choices[choice].end(finish)

    def take(self) -> list[Piece]:
        """What came since the last call, choice by choice; each choice's finish reason is given once."""
        self.unsent_bytes = 0
        return [piece for choice in self._choices if (piece := choice.take()) is not None]

    def _collect(self, choice: int) -> bool:
        output = self._choices[choice]
        before = output.unsent_chars
        if not output.collect():
            return False
        self.unsent_bytes += output.unsent_chars - before + _CHUNK_BYTES + self._held_bytes
        self._held_bytes = 0
        return True

    def _begin(self, prompt_logprobs: bytes) -> None:
        """What stands before the choices' own text is known."""
        plan = self._plan
        assert plan.echo is not None
        self._held_bytes += _SCORE_JSON * len(prompt_logprobs) + len(plan.echo)
        scores = [None, *unpack_logprobs(prompt_logprobs, len(plan.prompt) - 1)] if plan.sampling.logprobs >= 0 else []
        echo = make_echo(plan.prompt, plan.echo, scores, self._tokenizer)
        for choice in self._choices:
            choice.begin(echo)
