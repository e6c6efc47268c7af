"""One choice on its way to the client: its text and its tokens' log-probabilities, until they are taken. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.logprobs import TokenLogprob
from shared.ingress.choice_text import ChoiceText
from shared.ingress.output_form import PLAIN, OutputForm, OutputParser, shown_bytes
from shared.ingress.request_plan import RequestPlan
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer
from shared.tools.tool_stream import CallArguments, CallStart, Content, joined


class ScoredToken(NamedTuple):
    """A token of the answer, where its text begins (code points), and what it scored.

    `logprob` is None for the first token of a prompt, which nothing comes before.
    """

    token_id: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Piece:
    """What came of one choice since the last look.

    `finish` is set once, in the last one; with it `stop`, if a stop string ended the choice.
    """

    choice: int
    text: str = ""
    finish: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    thoughts: str = ""
    calls: list[CallStart | CallArguments] = field(default_factory=list)
    stop: str = ""
    mixed: list[Content | CallStart | CallArguments] = field(default_factory=list)
    """`text` and `calls` as they came, where there are both."""

    @property
    def in_order(self) -> list[Content | CallStart | CallArguments]:
        """What is said and the calls, as they came."""
        return self.mixed or [*([Content(self.text)] if self.text else ()), *self.calls]

    @property
    def says(self) -> bool:
        """True when there is anything but an end in it."""
        return bool(self.text or self.thoughts or self.calls)


@dataclass(frozen=True, slots=True)
class Echo:
    """What stands before a choice's own text."""

    text: str
    tokens: tuple[ScoredToken, ...] = ()


def make_echo(prompt: Sequence[int], text: str, scores: Sequence[TokenLogprob | None], tokenizer: Tokenizer) -> Echo:
    """A prompt repeated before the answer; `scores` are of its tokens, or none."""
    detokenizer, tokens, offset = Detokenizer(tokenizer.token_bytes), [], 0
    for token_id, score in zip(prompt, scores, strict=False):
        tokens.append(ScoredToken(token_id, offset, score))
        offset += len(detokenizer.push((token_id,)))
    return Echo(text, tuple(tokens))


class ChoiceOutput:
    """Text and scores of a choice. A token's score is given with the last of its text, or at the end.

    Args:
        text: the choice's text; it keeps ends where scores are wanted.
        echo: nothing is given before `begin`.
        form: how the text is read; without it, it is all said.
    """

    def __init__(self, choice: int, text: ChoiceText, *, echo: bool = False, form: OutputForm = PLAIN) -> None:
        self._parser = None if form.is_plain else OutputParser(form)
        self.choice = choice
        self.text = text
        self.unsent_chars = 0
        self._waits = echo
        self._before = 0  # code points of the echo
        self._unsent: list[str] = []
        self._given = 0  # code points of the choice's own text
        self._tokens: list[ScoredToken] = []
        self._scored = 0  # tokens
        self._finish = ""
        self._finish_given = False

    def begin(self, echo: Echo) -> None:
        """What stands before the text is known. Once."""
        if self._waits:
            self._waits = False
            self._before = len(echo.text)
            self._unsent.insert(0, echo.text)
            self.unsent_chars += len(echo.text)
            moved = [token._replace(offset=token.offset + self._before) for token in self._tokens]
            self._tokens = [*echo.tokens, *moved]

    def score(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Scores of the next tokens of the text."""
        ends = self.text.ends
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            start = ends[self._scored - 1] if self._scored else 0
            self._tokens.append(ScoredToken(token_id, self._before + start, logprob))
            self._scored += 1

    @property
    def thought_tokens(self) -> int:
        """Tokens in which thoughts, as far as they were taken, have a part; needs the text's ends."""
        length = 0 if self._parser is None else self._parser.thought_chars
        return min(bisect_left(self.text.ends, length) + 1, len(self.text.ends)) if length else 0

    def collect(self) -> bool:
        """Take over what text has become ready; True when there is some."""
        text = self.text.take()
        if text:
            self._unsent.append(text)
            self.unsent_chars += len(text)
            self._given += len(text)
        return bool(text)

    def end(self, finish: str) -> None:
        """No more comes."""
        self._finish = finish

    def take(self) -> Piece | None:
        """What is new; None when nothing is."""
        ends = bool(self._finish) and not self._finish_given
        if self._waits and not ends:
            return None
        piece = self._read("".join(self._unsent), ends)
        self._unsent.clear()
        self.unsent_chars = 0
        self._finish_given |= ends
        if not piece.says and not ends:
            return None
        if self._tokens:
            piece.tokens = self._take_tokens()
        if ends:
            piece.stop = self.text.stopped_by
        return piece

    def _read(self, text: str, ends: bool) -> Piece:
        finish = self._finish if ends else ""
        if self._parser is None:
            return Piece(self.choice, text, finish)
        parsed = [self._parser.push(text)]
        if ends:
            parsed.append(self._parser.finish())
        said, calls = "".join(part.said for part in parsed), [call for part in parsed for call in part.calls]
        return Piece(
            self.choice,
            said,
            finish and self._parser.reason(finish),
            thoughts="".join(part.thoughts for part in parsed),
            calls=calls,
            mixed=joined(news for part in parsed for news in part.in_order) if said and calls else [],
        )

    def _take_tokens(self) -> list[ScoredToken]:
        count = len(self._tokens)
        if not self._finish:
            first, ends = self._scored - count, self.text.ends  # of the echo's, `first` is negative
            while count and first + count > 0 and ends[first + count - 1] > self._given:
                count -= 1
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return taken


def new_output(choice: int, plan: RequestPlan, tokenizer: Tokenizer) -> ChoiceOutput:
    """The output of a planned request's choice. The token that ended it shows no text, unless it is to be kept."""
    silent = frozenset() if plan.keep_stop else frozenset(plan.sampling.stop_token_ids)
    token_bytes = shown_bytes(tokenizer, plan.form)
    text = ChoiceText(
        (lambda token_id: b"" if token_id in silent else token_bytes(token_id)) if silent else token_bytes,
        plan.stops,
        keep_stop=plan.keep_stop,
        min_tokens=plan.sampling.min_tokens,
        keep_ends=plan.sampling.logprobs >= 0 or plan.form.thoughts is not None,
    )
    return ChoiceOutput(choice, text, echo=plan.echo is not None, form=plan.form)
