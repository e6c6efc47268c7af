"""Grammars compiled for one tokenizer, by llguidance; compiled ones are kept by digest.

Everything here may block: compiling takes a millisecond for a common schema, and the library's own limits of work cut
it off, in every process alike. Nothing fails open: what the library does not support it refuses, and its options that
would overlook something are not in reach of clients.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import llguidance
import numpy as np

from shared.contracts.errors import InvalidInput
from shared.grammar.constraint import Constraint, GrammarWorn, panics_mapped
from shared.text.tokenizer import Tokenizer, load_tokenizer

MAX_KEPT = 32
SLOW_S = 0.3
"""Most processor seconds of compiling at the door: what takes longer would hold up others' steps later."""
PROBE_STEPS = 4
_MAX_REASON_CHARS = 300
_NOTHING = "no output can match it"
_TOO_MUCH = ("too many", "too big", "fuel", "too large")
_PLACE = re.compile(r"^at \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)


class GrammarCompiler:
    """Grammars for one tokenizer; safe to use from several threads.

    Args:
        eos_ids: tokens that end an output, beside the tokenizer's own; they are allowed where the grammar may end.
        slow_s: processor seconds above which a grammar is refused; 0 = no matter, where it was let in by another.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int] = (), *, slow_s: float = 0.0) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eos_ids = tuple(sorted({i for i in (*tokenizer.eos_ids, *eos_ids) if 0 <= i < self.vocab_size}))
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self.eos_ids))
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=list(self.eos_ids) or None)
        self._slow_s = slow_s
        self._limits = _limits()
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, llguidance.LLMatcher | str] = OrderedDict()

    def require(self, grammar: str, field: str = "response_format") -> None:
        """Compile and keep a grammar.

        Raises:
            InvalidInput: it is wrong, not supported, takes too much work or matches nothing (param `field`).
        """
        found = self._compiled(grammar)
        if isinstance(found, str):
            raise InvalidInput(f"{field}: {found}", param=field)

    def constraint(self, grammar: str) -> Constraint:
        """A new output's place in a grammar. Raises InvalidInput as `require`."""
        found = self._compiled(grammar)
        if isinstance(found, str):
            raise InvalidInput(f"response_format: {found}", param="response_format")
        with self._lock:
            # copies share what their lexer has learnt, and its limit
            return Constraint(found.deep_copy(), self.eos_ids, self.vocab_size)

    def renew(self, grammar: str) -> Constraint:
        """As `constraint`, of a grammar compiled anew: for one that is worn."""
        with self._lock:
            self._kept.pop(_key(grammar), None)
        return self.constraint(grammar)

    def ids_of(self, texts: Iterable[bytes]) -> list[int]:
        """Ids of the tokens that stand for these bytes, where there are any."""
        return [i for text in texts for i in self._tokenizer.tokenize_bytes(text)[:1]]

    def _compiled(self, grammar: str) -> llguidance.LLMatcher | str:
        """The matcher of a grammar, or why there is none."""
        key = _key(grammar)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = self._compile(grammar)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, grammar: str) -> llguidance.LLMatcher | str:
        started = time.thread_time()
        try:
            with panics_mapped():
                matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
                fault = matcher.get_error() or self._probe(matcher.deep_copy())
        except GrammarWorn as exc:
            return str(exc)
        if fault:
            return _reason(fault)
        if self._slow_s and time.thread_time() - started > self._slow_s:
            return "it takes too much work"
        return matcher

    def _probe(self, matcher: llguidance.LLMatcher) -> str:
        """Take a few steps: what is wrong with them, or "". A grammar that compiles may match nothing, or be too much.

        What the lexer learns here is of use to every output.
        """
        for step in range(PROBE_STEPS):
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error():
                return matcher.get_error()
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not len(allowed) and not step:
                return _NOTHING
            going_on = allowed[~np.isin(allowed, self.eos_ids)]
            if not len(going_on):
                return ""
            matcher.consume_token(int(going_on[0]))
        return matcher.get_error()


def _key(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(), digest_size=16).digest()


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=20_000,  # about 16 MB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class LazyCompiler:
    """The compiler of a model folder, made when it is first needed, as that takes half a second."""

    def __init__(self, folder: Path, eos_ids: Iterable[int] = ()) -> None:
        self._folder = folder
        self._eos_ids = tuple(eos_ids)
        self._lock = threading.Lock()
        self._made: GrammarCompiler | None = None

    def get(self) -> GrammarCompiler:
        """The compiler. Raises SettingsError for a folder without a tokenizer that can be used."""
        with self._lock:
            if self._made is None:
                self._made = GrammarCompiler(load_tokenizer(self._folder), self._eos_ids)
            return self._made


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token, and the ids of a text."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = [token.id for token in tokenizer.special_tokens.values()]
        self.tokens = [tokenizer.token_bytes(i, skip_special=False) for i in range(tokenizer.vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("takes text")  # tells the library to hand over text
        return self._tokenizer.encode(text)


def _reason(message: str) -> str:
    """The library's words on one line, without the place in our text around the client's."""
    message = _PLACE.sub("", message.replace("<non-verbose/>", ""))
    words = " ".join(message.split())
    if words == "NoExtensionBias":  # the library's word for a grammar without any text
        return _NOTHING
    if any(word in words for word in _TOO_MUCH):
        return "it takes too much work"
    return f"not supported: {words[:_MAX_REASON_CHARS]}"
