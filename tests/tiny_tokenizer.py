"""A byte-level BPE tokenizer small enough to write down, for tests that need no real model."""

from __future__ import annotations

import json
from typing import Any

from shared.text.tokenizer import Tokenizer, byte_alphabet

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = ["Ċ Ċ", "ĊĊ Ċ", "h i", "Ġ hi", "u s", "e r", "us er", "user Ċ", "> <"]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer_json(specials: tuple[str, ...] = SPECIALS, plain_added: tuple[str, ...] = (), **flags: Any) -> bytes:
    """`tokenizer.json` with the specials as ids 0.., all bytes, and a few merges that cross message borders."""
    alphabet = [char for char, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
    tokens = [*specials, *plain_added, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [(text, True) for text in specials] + [(text, False) for text in plain_added]
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "special": special, "single_word": False, "normalized": False}
            | {"lstrip": False, "rstrip": False, **(flags if special else {})}
            for i, (text, special) in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": MERGES,
        },
    }
    return json.dumps(description).encode()


def tiny_tokenizer(chat_template: str = CHATML, **options: Any) -> Tokenizer:
    """ChatML with ids 0, 1, 2 for end of text, start and end of a turn."""
    settings = {"chat_template": chat_template, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(tokenizer_json(**options), settings)
