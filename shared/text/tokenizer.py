"""Text to token ids and back, for byte-level BPE tokenizers, from a model folder's `tokenizer.json`.

Special tokens are parsed only where the caller says so: text from strangers can never become one. A special token is
found before anything else and no merge crosses it, so the stretches between special tokens are encoded whole, each on
its own; that is what `tokenizers` and llama.cpp do too, and the ids are the same. Added tokens that are not flagged
special, such as `<think>` in some models, are vocabulary like any other.

What a tokenizer puts before and after a text (`<|begin_of_text|>`, say) is the rule of `tokenizer.json` alone, as in
transformers 5: `add_bos_token` in `tokenizer_config.json` changes nothing. It belongs to plain completions; a chat
template writes such tokens itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from shared.contracts.errors import InvalidInput, SettingsError
from shared.text.added_tokens import AddedToken, add_tokens, token_text
from shared.text.alternatives import longest_of


class Tokenizer:
    """One model's tokenizer; safe to use from several threads. Only `encode_prompt` adds tokens of its own.

    A byte that the vocabulary lacks is dropped, as `tokenizers` and llama.cpp do; the default model lacks some control
    characters and the first byte of unassigned planes. So a text that is not empty can have no ids.

    Attributes:
        vocab_size: one more than the highest id; the model's output may be wider.
        longest_token: most bytes one token stands for.
        bos_id, eos_ids: the token that begins a sequence, if any, and those that end it.
        bos_token, eos_token: their texts, "" if there is none.
        chat_template: Jinja source, or None.
        special_tokens: the control tokens by text.
        digest: SHA-256 of `tokenizer.json` and of the added tokens, as `sha256:<hex>`; equal digests give equal ids.
    """

    def __init__(self, tokenizer_json: bytes, settings: Mapping[str, Any], eos_ids: Iterable[int] = ()) -> None:
        """From the bytes of `tokenizer.json` and the content of `tokenizer_config.json`; see `load_tokenizer`.

        Raises:
            SettingsError: not a byte-level BPE tokenizer.
        """
        description = _parse(tokenizer_json)
        self._encoder = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        self._encoder.no_truncation()
        self._encoder.no_padding()
        added = add_tokens(self._encoder, description["added_tokens"], settings)
        # special tokens are found here, by the rule of this module, and never in the library
        self._encoder.encode_special_tokens = True
        self.special_tokens = {token.text: token for token in added if token.special}
        self._special_ids = frozenset(token.id for token in self.special_tokens.values())
        self._pattern = _alternatives(self.special_tokens.values())
        self._bytes = _byte_table(description["model"]["vocab"], {token.id: token.text for token in added})
        self._before, self._after = _ends(self._encoder)
        self.digest = f"sha256:{hashlib.sha256(tokenizer_json + repr(added).encode()).hexdigest()}"
        self.vocab_size = len(self._bytes)
        self.longest_token = max(map(len, self._bytes), default=0)
        self.bos_token = token_text(settings.get("bos_token"))
        self.eos_token = token_text(settings.get("eos_token"))
        self.bos_id: int | None = self._encoder.token_to_id(self.bos_token) if self.bos_token else None
        named = self._encoder.token_to_id(self.eos_token) if self.eos_token else None
        self.eos_ids = tuple(eos_ids) or (() if named is None else (named,))
        self.chat_template = _chat_template(settings.get("chat_template"))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        Args:
            text: any valid Unicode.
            parse_special: turn the texts of special tokens into these tokens. Right only where whoever wrote the text
                owns the whole prompt, as in a plain completion; for chat see `chat_prompt`.

        Raises:
            InvalidInput: the text holds a lone surrogate (param `prompt`).
        """
        if parse_special:
            return self.encode_marked(text, {})
        return self._encode_plain(text)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain completion's prompt: special tokens parsed, between what the tokenizer puts around a text.

        Raises:
            InvalidInput: the text holds a lone surrogate (param `prompt`).
        """
        return [*self._before, *self.encode(text, parse_special=True), *self._after]

    def encode_marked(self, text: str, marks: Mapping[int, str]) -> list[int]:
        """The ids of a text in which special tokens are parsed, except where a mark stands inside one.

        Args:
            text: may hold marks, which are code points that stand for others.
            marks: code point of each mark → the character it stands for.

        Raises:
            InvalidInput: the text holds a lone surrogate (param `prompt`).
        """
        if not marks and text and self._pattern.search(text) is None:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self._split(text):
            if isinstance(piece, AddedToken):
                ids.append(piece.id)
            else:
                ids.extend(self._encode_plain(piece.translate(marks)))
        return ids

    def parsed_specials(self, text: str) -> list[int]:
        """The special tokens that `encode` with `parse_special` finds in a text, in order."""
        return [self.special_tokens[found].id for found in self._pattern.findall(text)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Equal to what `Detokenizer` streams."""
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes one id stands for.

        b"" for a special token, unless `skip_special` is off, and for an id past the vocabulary, which a model whose
        output is padded can produce.
        """
        if not 0 <= token_id < self.vocab_size or (skip_special and token_id in self._special_ids):
            return b""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """True for the id of a control token."""
        return token_id in self._special_ids

    def _encode_plain(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidInput("the text holds a lone surrogate, which is not valid Unicode", param="prompt") from exc
        # of the library's calls only this one lets other threads run meanwhile (tried, 0.23)
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _split(self, text: str) -> Iterator[str | AddedToken]:
        """Special tokens, the leftmost and then the longest first, and the stretches between them."""
        start, strip_next = 0, False
        for match in self._pattern.finditer(text):
            token = self.special_tokens[match.group()]
            yield from _stretch(text[start : match.start()], strip_next, token.lstrip)
            yield token
            start, strip_next = match.end(), token.rstrip
        yield from _stretch(text[start:], strip_next, False)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; about 0.2 s for 50,000 tokens.

    Reads `tokenizer.json`, and where they exist `tokenizer_config.json`, `chat_template.jinja` and the end tokens in
    `generation_config.json` or else `config.json`.

    Raises:
        SettingsError: a file is missing or broken, or the tokenizer is not byte-level BPE (param: the file).
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer_json = path.read_bytes()
    except OSError as exc:
        raise SettingsError(f"cannot read {path}; is {folder} a model folder?", param=str(path)) from exc
    settings = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        # older folders name the special tokens here
        settings = {**_read_object(folder / "special_tokens_map.json"), **settings}
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings = {**settings, "chat_template": template.read_text(encoding="utf-8")}
    eos = _read_object(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_object(folder / "config.json").get("eos_token_id")
    eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
    try:
        return Tokenizer(tokenizer_json, settings, eos_ids)
    except SettingsError as exc:
        raise SettingsError(f"{path}: {exc.message}", param=str(path)) from exc


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2's table), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_table(vocab: Mapping[str, int], added: Mapping[int, str]) -> list[bytes]:
    alphabet = byte_alphabet()
    table = [b""] * (max([*vocab.values(), *added], default=-1) + 1)
    for text, i in vocab.items():
        if i not in added:
            try:
                table[i] = bytes(map(alphabet.__getitem__, text))
            except KeyError as exc:
                raise SettingsError(f"token {i} is not in the byte-level alphabet") from exc
    for i, text in added.items():
        table[i] = text.encode()
    return table


def _parse(tokenizer_json: bytes) -> dict[str, Any]:
    try:
        description = json.loads(tokenizer_json)
        model, decoder = description["model"]["type"], description["decoder"] or {}
        steps = decoder.get("decoders", [decoder])
        byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise SettingsError("not a tokenizer.json of the tokenizers library") from exc
    if model != "BPE" or not byte_level:
        raise SettingsError("only byte-level BPE tokenizers are supported")
    description.setdefault("added_tokens", [])
    return dict(description)


def _alternatives(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    texts = {token.text: token.single_word for token in tokens}
    # looking back over the text itself says the same as looking back before it
    alone = {text: rf"(?<!\w{re.escape(text)})(?!\w)" for text, single_word in texts.items() if single_word}
    return re.compile(longest_of(texts, alone))


def _ends(encoder: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text."""
    plain = encoder.encode("a", add_special_tokens=False).ids
    whole = encoder.encode("a", add_special_tokens=True).ids
    at = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


def _stretch(text: str, strip_left: bool, strip_right: bool) -> Iterator[str]:
    text = text.lstrip() if strip_left else text
    text = text.rstrip() if strip_right else text
    if text:
        yield text


def _chat_template(value: Any) -> str | None:
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}.get("default")
    return None if value is None else str(value)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise SettingsError(f"cannot read {path} as JSON", param=str(path)) from exc
    if not isinstance(content, dict):
        raise SettingsError(f"{path} does not hold a JSON object", param=str(path))
    return content
