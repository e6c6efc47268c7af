"""What the ingress-stream core asks its shell to do. Plain data; the shell carries effects out in list order."""

from __future__ import annotations

import msgspec

from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError
from shared.contracts.ids import WorkerId
from shared.contracts.parts import ComputeRow


class Effect(msgspec.Struct, frozen=True):
    """One thing to do."""


class SubmitAttempt(Effect, frozen=True):
    """Send `Submit` to the scheduler. `token_ids` is the prompt plus what earlier epochs committed."""

    attempt: Attempt
    token_ids: list[int]
    num_prompt_tokens: int
    age_s: float
    numerics: str = ""


class Commit(Effect, frozen=True):
    """These output tokens of `choice` are the client's now, from sequence number `first_seq` on."""

    choice: int
    first_seq: int
    token_ids: list[int]
    logprobs: bytes = b""  # of token_ids, packed; empty when none were asked for
    prompt_logprobs: bytes = b""  # with the first tokens


class EndChoice(Effect, frozen=True):
    """Nothing more comes for `choice`. `finish`: stop | length."""

    choice: int
    finish: str


class AskReplay(Effect, frozen=True):
    """Send `StreamReplay`; give the answer to `on_replayed`. No answer needs no call: `on_tick` asks again."""

    attempt: Attempt
    worker: WorkerId
    choice: int
    from_seq: int


class SendCancel(Effect, frozen=True):
    """Send `Cancel` to a worker of `role` (decode | prefill); a decode worker's answer goes to `on_cancel_reply`."""

    attempt: Attempt
    worker: WorkerId
    reason: str
    role: str = "decode"


class SendFinish(Effect, frozen=True):
    """Send `Finish`; give the answer, or None without one, to `on_finish_reply`."""

    attempt: Attempt
    worker: WorkerId
    choice: int
    num_tokens: int


class AckFinal(Effect, frozen=True):
    """Send `FinalAck`: the attempt's final arrived (again)."""

    attempt: Attempt
    worker: WorkerId


class SettleRequest(Effect, frozen=True):
    """Publish `Settle` to policy. Exactly one a request."""

    attempt: Attempt
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: str
    compute: tuple[ComputeRow, ...]


class End(Effect, frozen=True):
    """The request is over for the client. Exactly one a request. `finish`: stop | length | cancelled | error.

    `error` is set with `cancelled` and `error`.
    """

    finish: str
    error: BatonError | None = None
