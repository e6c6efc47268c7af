"""Added tokens, special tokens and what stands round a prompt: the ids of transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.errors import SettingsError
from shared.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizer import MERGES, SPECIALS, tokenizer_json

NEXT = len(SPECIALS) + 256 + len(MERGES)
TEXTS = (
    *("hi", "", " hi<|im_end|> hi", "<tool>x</tool>", "a<tool>b", "<tool> <tool>", "use<kw>r", "a <kw> b", "<kw>"),
    *("Ġhi", "<|endoftext|><|im_start|>", "us er", "user\n\n\n", "<s>hi<pad>"),
)


def listed(id: int, content: str, **flags: bool) -> dict[str, Any]:
    names = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return {str(id): {"content": content} | {name: flags.get(name, False) for name in names}}


def bos_processor(before: str, after: str = "") -> dict[str, Any]:
    """A post-processor that puts special tokens before and after a text."""
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": t, "type_id": 0}} for t in (before,)] + [piece]
    single += [{"SpecialToken": {"id": after, "type_id": 0}}] if after else []
    used = {t: {"id": t, "ids": [SPECIALS.index(t)], "tokens": [t]} for t in (before, after) if t}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, piece], "special_tokens": used}


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "new special": {"added_tokens_decoder": listed(NEXT, "<tool>", special=True)},
    "new plain": {"added_tokens_decoder": listed(NEXT, "<tool>") | listed(NEXT + 1, "</tool>", lstrip=True)},
    "order": {"added_tokens_decoder": listed(NEXT + 1, "</tool>") | listed(NEXT, "<tool>", special=True)},
    "stripping": {"added_tokens_decoder": listed(NEXT, "<tool>", special=True, lstrip=True, rstrip=True)},
    "single word": {"added_tokens_decoder": listed(NEXT, "<kw>", special=True, single_word=True)},
    "made special": {
        "plain_added": ("<tool>",),
        "added_tokens_decoder": listed(3, "<tool>", special=True),
    },
    "named": {
        "vocab": ("<s>", "<pad>", "<tool>"),
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<tool>"],
    },
    "template": {"post_processor": bos_processor("<|im_start|>"), "add_bos_token": False},
    "both ends": {"post_processor": bos_processor("<|im_start|>", "<|im_end|>")},
    "flag alone": {"bos_token": "<|im_start|>", "add_bos_token": True},
    "truncating": {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
}


def make_folder(folder: Path, case: dict[str, Any]) -> Path:
    description = json.loads(tokenizer_json(plain_added=case.get("plain_added", ())))
    description["model"]["vocab"] |= {text: NEXT + i for i, text in enumerate(case.get("vocab", ()))}
    for name in ("post_processor", "truncation"):
        description[name] = case.get(name, description[name])
    (folder / "tokenizer.json").write_text(json.dumps(description))
    of_json = ("plain_added", "post_processor", "truncation", "vocab")
    settings = {name: value for name, value in case.items() if name not in of_json}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ids_equal_transformers(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = make_folder(tmp_path, CASES[name])
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        wanted = theirs(text, add_special_tokens=False, truncation=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == wanted, text
        assert ours.encode_prompt(text) == theirs(text, add_special_tokens=True)["input_ids"], text
        assert ours.decode(wanted, skip_special=False) == theirs.decode(wanted)
        assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", CASES)
def test_text_never_becomes_a_special_token(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, CASES[name]))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_special, ids)), text


def test_beginning_and_end_are_special_whatever_their_flags_say(tmp_path: Path) -> None:
    case = {"plain_added": ("<s>", "</s>"), "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    tokenizer = load_tokenizer(make_folder(tmp_path, case))
    assert tokenizer.encode("<s></s>", parse_special=True) == [3, 4]
    assert not {3, 4} & set(tokenizer.encode("<s></s>"))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (3, (4,))


def test_a_named_token_that_the_vocabulary_lacks_gets_no_id(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, {"pad_token": "[PAD]"}))
    assert tokenizer.vocab_size == NEXT
    assert "[PAD]" not in tokenizer.special_tokens


def test_older_folders_name_their_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"vocab": ("<pad>",)})
    map_ = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(map_))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_tokens["<pad>"].id == NEXT


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (listed(NEXT + 5, "<tool>"), f"'<tool>' has id {NEXT + 5} there and {NEXT}"),
        ({"x": {"content": "<tool>"}}, "does not hold tokens by id"),
        ({"5": "<tool>"}, "does not hold tokens by id"),
        ([1], "does not hold tokens by id"),
    ],
)
def test_a_wrong_list_of_added_tokens_is_refused(decoder: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Tokenizer(tokenizer_json(), {"added_tokens_decoder": decoder})


def test_the_digest_knows_added_tokens() -> None:
    plain = Tokenizer(tokenizer_json(), {})
    assert Tokenizer(tokenizer_json(), {"added_tokens_decoder": listed(NEXT, "<tool>")}).digest != plain.digest
    assert Tokenizer(tokenizer_json(), {"chat_template": "x"}).digest == plain.digest
