"""Tokenizer: rules on a tiny vocabulary; on the default model llama.cpp's golden ids and the library's decoding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.errors import InvalidInput, SettingsError
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer, byte_alphabet, load_tokenizer
from tests.tiny_tokenizer import tiny_tokenizer, tokenizer_json

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizer_smollm2.json").read_text())
FRAGMENTS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "\n", "\n\n", "user", " hi", "<", ">", "é"]
)
TEXTS = st.one_of(st.text(max_size=20), st.lists(FRAGMENTS, max_size=8).map("".join))

TINY = tiny_tokenizer()
LIBRARY = tokenizers.Tokenizer.from_str(tokenizer_json().decode())


def library_ids(text: str) -> list[int]:
    return list(LIBRARY.encode(text, add_special_tokens=False).ids)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_parsed_specials_give_the_librarys_ids(text: str) -> None:
    assert TINY.encode(text, parse_special=True) == library_ids(text)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_plain_text_never_becomes_a_special_token(text: str) -> None:
    ids = TINY.encode(text)
    assert not any(map(TINY.is_special, ids))
    assert TINY.decode(ids) == text


@given(st.lists(st.integers(0, TINY.vocab_size - 1), max_size=30), st.booleans())
@settings(max_examples=300, deadline=None)
def test_decode_is_the_librarys_and_what_is_streamed(ids: list[int], skip: bool) -> None:
    text = TINY.decode(ids, skip_special=skip)
    assert text == LIBRARY.decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(lambda i: TINY.token_bytes(i, skip_special=skip))
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text


def test_a_mark_inside_a_special_token_breaks_it() -> None:
    marks = {ord("\ue000"): "<"}
    ids = TINY.encode_marked("<|im_start|>a\ue000|im_end|><|im_end|>", marks)
    assert [i for i in ids if TINY.is_special(i)] == [1, 2]
    assert TINY.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|><|im_end|>"


def test_white_space_beside_a_stripping_special_token_is_swallowed() -> None:
    for text in ("a \n<|im_end|> \n b", "<|im_end|>  <|im_end|>", " <|im_end|>"):
        tokenizer = tiny_tokenizer(lstrip=True, rstrip=True)
        library = tokenizers.Tokenizer.from_str(tokenizer_json(lstrip=True, rstrip=True).decode())
        assert tokenizer.encode(text, parse_special=True) == library.encode(text).ids


def test_added_tokens_that_are_not_special_are_vocabulary() -> None:
    tokenizer = tiny_tokenizer(plain_added=("<think>",))
    assert tokenizer.encode("<think>") == [3]
    assert tokenizer.decode([3]) == "<think>"
    assert not tokenizer.is_special(3)


def test_bytes_of_specials_and_of_ids_past_the_vocabulary() -> None:
    assert TINY.token_bytes(2) == b""
    assert TINY.token_bytes(2, skip_special=False) == b"<|im_end|>"
    assert TINY.token_bytes(TINY.vocab_size) == b""
    assert TINY.token_bytes(-1) == b""


def test_byte_alphabet_covers_every_byte_once() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert (byte_alphabet()["Ġ"], byte_alphabet()["Ċ"]) == (32, 10)


def test_a_lone_surrogate_is_refused() -> None:
    for parse_special in (False, True):
        with pytest.raises(InvalidInput) as caught:
            TINY.encode("a\ud800", parse_special=parse_special)
        assert caught.value.param == "prompt"


def write_folder(folder: Path, **files: object) -> Path:
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_load_reads_ids_and_template(tmp_path: Path) -> None:
    settings_ = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": "A"}
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer_config=settings_, config={"eos_token_id": 2}))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, (2,), "A")

    write_folder(tmp_path, generation_config={"eos_token_id": [0, 2]})
    (tmp_path / "chat_template.jinja").write_text("B")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((0, 2), "B")
    assert tokenizer.digest == TINY.digest


def test_named_templates_use_the_default() -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert Tokenizer(tokenizer_json(), {"chat_template": templates}).chat_template == "D"


def test_load_names_the_file_at_fault(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="model folder"):
        load_tokenizer(tmp_path)
    for content in (b"not json", b"[]", b'{"model": {"type": "Unigram"}, "decoder": null}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(SettingsError) as caught:
            load_tokenizer(tmp_path)
        assert caught.value.param == str(tmp_path / "tokenizer.json")
    write_folder(tmp_path, config=[1])
    with pytest.raises(SettingsError, match=r"config\.json"):
        load_tokenizer(tmp_path)


def test_the_text_package_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, shared.text.chat_prompt; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def smollm2(default_model_dir: Path) -> Tokenizer:
    return load_tokenizer(default_model_dir)


def kept(tokenizer: Tokenizer, text: str) -> str:
    """The text without the bytes that the vocabulary lacks."""
    lost = set(range(256)) - {b[0] for b in map(tokenizer.token_bytes, range(tokenizer.vocab_size)) if len(b) == 1}
    return bytes(b for b in text.encode() if b not in lost).decode("utf-8", "replace")


@pytest.mark.model
@pytest.mark.parametrize(("group", "parse_special"), [("plain", False), ("parse_special", True)])
def test_golden_ids_of_llama_cpp(smollm2: Tokenizer, group: str, parse_special: bool) -> None:
    cases = GOLDEN[group]
    assert len(cases) == {"plain": 266, "parse_special": 12}[group]
    different = [c["text"] for c in cases if smollm2.encode(c["text"], parse_special=parse_special) != c["ids"]]
    assert different == []
    for case in cases:
        assert smollm2.decode(case["ids"], skip_special=False) == kept(smollm2, case["text"])


@pytest.mark.model
def test_the_default_models_ids(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49_152, 1, (2,))
    assert smollm2.chat_template is not None
    assert len(smollm2.special_tokens) == 17


@pytest.mark.model
def test_random_text_survives_the_default_model(smollm2: Tokenizer, default_model_dir: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))

    @settings(max_examples=200, deadline=None)
    @given(TEXTS, st.lists(st.integers(0, 49_151), max_size=30))
    def check(text: str, ids: list[int]) -> None:
        assert smollm2.decode(smollm2.encode(text)) == kept(smollm2, text)
        assert smollm2.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids
        assert smollm2.decode(ids) == library.decode(ids, skip_special_tokens=True)

    check()
