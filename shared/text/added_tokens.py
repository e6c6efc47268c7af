"""The added tokens of a tokenizer: of `tokenizer.json`, and what `tokenizer_config.json` adds, as in transformers.

Needs `tokenizers` for the ids of new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from shared.contracts.errors import SettingsError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ENDS = NAMED[:2]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token found in text before anything else is.

    Attributes:
        special: a control token.
        lstrip, rstrip: it swallows the white space before or after it.
        single_word: it is found only where no letter or digit touches it.
    """

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def add_tokens(
    encoder: tokenizers.Tokenizer, listed: list[dict[str, Any]], settings: Mapping[str, Any]
) -> list[AddedToken]:
    """Every added token, after `encoder` learnt those that `tokenizer.json` lacks.

    Tokens that the settings list (`added_tokens_decoder`) come first, then those they name (`bos_token`, …,
    `additional_special_tokens`) where the vocabulary has them. A name alone never makes a new id: no model has a row
    for it. Beginning and end of a sequence are control tokens whatever their flags say.

    Args:
        listed: `added_tokens` of `tokenizer.json`.
        settings: `tokenizer_config.json`.

    Raises:
        SettingsError: the settings list a token with another id than it has, or what is no token.
    """
    tokens = {entry["content"]: _token(entry["id"], entry) for entry in listed}
    named = list(_named(settings))

    def add(token: AddedToken) -> None:
        tokens[token.text] = token
        encoder.add_tokens([_for_library(token)])

    for declared, entry in _decoder(settings):
        token = _token(declared, entry)
        if token.text in tokens:
            if token.special:
                add(replace(tokens[token.text], special=True))
        elif token.text:
            add(replace(token, special=token.special or token.text in named))
            if (found := encoder.token_to_id(token.text)) != declared:
                raise SettingsError(
                    f"added_tokens_decoder: token {token.text!r} has id {declared} there and {found} by tokenizer.json",
                    param="added_tokens_decoder",
                )
    for text in named:
        if text not in tokens and (known := encoder.token_to_id(text)) is not None:
            add(AddedToken(known, text))
    for text in (token_text(settings.get(name)) for name in ENDS):
        if text in tokens:
            add(replace(tokens[text], special=True))
    return list(tokens.values())


def token_text(value: Any) -> str:
    """The text of a token in `tokenizer_config.json`: older files hold the whole token there; "" for none."""
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value or "")


def _token(id: int, entry: Mapping[str, Any]) -> AddedToken:
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    return AddedToken(
        id,
        entry["content"],
        bool(entry.get("special", False)),
        **{name: bool(entry.get(name, False)) for name in flags},
    )


def _for_library(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.text,
        special=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
    )


def _decoder(settings: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    listed = settings.get("added_tokens_decoder") or {}
    try:
        entries = sorted((int(id), entry) for id, entry in listed.items())
        if not all(isinstance(entry["content"], str) for _, entry in entries):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise SettingsError("added_tokens_decoder does not hold tokens by id", param="added_tokens_decoder") from exc
    return entries


def _named(settings: Mapping[str, Any]) -> Iterator[str]:
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    values = [settings.get(name) for name in NAMED]
    values += more.values() if isinstance(more, Mapping) else more
    yield from dict.fromkeys(filter(None, map(token_text, values)))
