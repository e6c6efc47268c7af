"""GGUF files as models: their own integers reach the kernels as they are, and what cannot be read is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear.quantize import Int4Weight, to_int4
from services.cli.config import problems
from services.cli.stack_models import with_models
from shared.contracts.errors import SettingsError
from shared.model.checkpoint import EMBEDDING, HEAD
from shared.model.config import load_config
from shared.model.convert_gguf import NotTold, model_config, unpermute
from shared.model.decoder import load_decoder
from shared.model.folder import check_model_folder
from shared.model.gguf_folder import folder_of, gguf_folder, is_gguf
from shared.model.weights import Weights
from shared.settings.load import LoadedSettings, load_settings
from shared.text.tokenizer import load_tokenizer
from tests.native import require_native
from tests.unit.test_decoder import our_logits

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2"]
T = gguf.GGMLQuantizationType
SHAPES = {
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (FFN, HIDDEN),
    "blk.0.ffn_up": (FFN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FFN),
    "token_embd": (len(TOKENS), HIDDEN),
}
NAMES = {
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
    "token_embd": EMBEDDING,
    "output": HEAD,
}
Q4_1 = {name: T.Q8_0 if name == "token_embd" else T.Q4_1 for name in SHAPES}


def silent(_: str) -> None:
    """Nobody looks."""


def write(
    path: Path, kinds: Mapping[str, Any], pre: str = "smollm", architecture: str = "llama"
) -> dict[str, np.ndarray]:
    """A one-layer Llama; its matrices as llama.cpp means them, float32."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    values = {}
    for name, kind in kinds.items():
        plain = rng.standard_normal(SHAPES.get(name, SHAPES["token_embd"]), dtype=np.float32)
        data = gguf.quantize(plain, kind)
        values[name] = gguf.dequantize(data, kind).astype(np.float32)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", rng.standard_normal(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, heads in (("blk.0.attn_q", HEADS), ("blk.0.attn_k", KV_HEADS)):
        values[name] = unpermute(values[name], heads)
    return values


@pytest.fixture(scope="module")
def q4_1(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder of a Q4_1 file like the default model's, and its values."""
    base = tmp_path_factory.mktemp("gguf")
    values = write(base / "tiny.gguf", Q4_1)
    return gguf_folder(base / "tiny.gguf", base / "cache", silent), values


def test_a_suffix_is_one_in_capitals_too(tmp_path: Path) -> None:
    write(tmp_path / "A.GGUF", Q4_1)
    assert is_gguf(tmp_path / "A.GGUF")
    assert is_gguf(tmp_path / "none.Gguf")
    assert not is_gguf(tmp_path / "gguf")
    assert (gguf_folder(tmp_path / "A.GGUF", tmp_path / "cache", silent) / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", [T.Q4_1, T.Q4_0, T.Q8_0, T.BF16, T.F16, T.F32], ids=lambda kind: kind.name)
def test_every_value_is_the_files_own(tmp_path: Path, kind: Any) -> None:
    values = write(tmp_path / "a.gguf", dict.fromkeys([*SHAPES, "output"], kind))
    folder = gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", silent)
    check_model_folder(folder)
    config = load_config(folder)
    assert (config.tied_embeddings, config.head_dim, config.vocab_size, config.eos_token_ids) == (False, 16, 8, (2,))
    with Weights(folder, config) as weights:
        for name, ours in NAMES.items():
            assert np.array_equal(weights[ours].float().numpy(), values[name]), name
            kept = weights.kept(ours)
            integers = kind in (T.Q4_1, T.Q4_0) and name not in ("token_embd", "output")
            assert isinstance(kept, Int4Weight) is integers
        assert torch.equal(weights.mapped(EMBEDDING).float(), weights[EMBEDDING].float())


def test_blocks_of_q4_1_are_kept_bit_for_bit(q4_1: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder, _ = q4_1
    raw = {t.name: t for t in gguf.GGUFReader(folder.parents[2] / "tiny.gguf").tensors}["blk.0.ffn_down.weight"].data
    blocks = np.asarray(raw).reshape(HIDDEN, -1, 20)
    with Weights(folder, load_config(folder)) as weights:
        kept = weights.kept(NAMES["blk.0.ffn_down"])
    assert isinstance(kept, Int4Weight)
    assert np.array_equal(kept.scales.numpy(), blocks[:, :, :2].copy().view(np.float16)[:, :, 0])
    assert np.array_equal(kept.minima.numpy(), blocks[:, :, 2:4].copy().view(np.float16)[:, :, 0])
    integers = kept.integers.numpy().reshape(HIDDEN, -1, 32)
    assert np.array_equal(integers[:, :, :16], blocks[:, :, 4:] & 15)
    assert np.array_equal(integers[:, :, 16:], blocks[:, :, 4:] >> 4)


def test_kernels_get_the_files_integers_and_no_others(
    q4_1: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    folder, _ = q4_1
    monkeypatch.setattr("kernels.native.packed.to_int4", None)  # nothing is quantized anew
    model = load_decoder(folder, "float32", "native", threads=1, quant="int4")
    # the same values as floats, of which the kernels make the same integers again
    monkeypatch.setattr("kernels.native.packed.to_int4", to_int4)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    with Weights(folder, config := load_config(folder)) as weights:
        names = {name.removesuffix(".integers") for name in load_file(folder / "model.safetensors")}
        whole = {name: weights[name].clone() for name in names if not name.endswith((".scales", ".minima"))}
    save_file(whole, plain / "model.safetensors")
    again = load_decoder(plain, "float32", "native", threads=1, quant="int4")
    token_ids = [3, 4, 5, 6, 7, 3]
    found = our_logits(model, "float32", token_ids, tmp_path)
    assert found.shape == (6, config.vocab_size)
    assert torch.equal(found, our_logits(again, "float32", token_ids, tmp_path))
    # and near to what torch computes of the values themselves
    exact = our_logits(load_decoder(folder, "float32", "torch"), "float32", token_ids, tmp_path)
    assert (found - exact).norm() < 0.4 * exact.norm()


def test_tokenizer_and_template_come_from_the_file(q4_1: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = q4_1
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("ab12") == [5, 6, 7]
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        (Q4_1 | {"blk.0.ffn_up": T.Q5_0}, {}, r"a\.gguf: blk\.0\.ffn_up\.weight: type Q5_0 is not supported, only F32"),
        (Q4_1 | {"blk.0.attn_q_norm": T.F32}, {}, r"a\.gguf: blk\.0\.attn_q_norm\.weight: is not part of a Llama"),
        (Q4_1, {"pre": "qwen2"}, r"a\.gguf: tokenizer\.ggml\.pre: .*'qwen2'.*tokenizer\.json beside the file would do"),
        (Q4_1, {"architecture": "gemma"}, r"a\.gguf: general\.architecture: 'gemma' is not supported"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, kinds: Any, options: Any, message: str) -> None:
    write(tmp_path / "a.gguf", kinds, **options)
    with pytest.raises(SettingsError, match=message) as caught:
        gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", silent)
    assert "\n" not in caught.value.message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock" and path.is_file()]


def test_no_file_and_a_broken_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"a\.gguf does not exist"):
        gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", silent)
    (tmp_path / "a.gguf").write_bytes(b"GGUFnot")
    with pytest.raises(SettingsError, match=r"a\.gguf is not a GGUF file"):
        gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", silent)


def test_what_stands_beside_the_file_counts_and_a_change_makes_the_folder_anew(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", Q4_1, pre="qwen2")
    (tmp_path / "tokenizer.json").write_text('{"mine": 1}')
    lines: list[str] = []
    folder = gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", lines.append)
    assert gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", lines.append) == folder
    assert (folder / "tokenizer.json").read_text() == '{"mine": 1}'
    assert lines == ["reading a.gguf"]
    (tmp_path / "tokenizer.json").write_text('{"mine": 22}')
    gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", lines.append)
    assert (folder / "tokenizer.json").read_text() == '{"mine": 22}'
    assert len(lines) == 2


def test_what_a_killed_start_left_behind_goes(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", Q4_1)
    models = folder_of(tmp_path / "a.gguf", tmp_path / "cache").parent
    left = models / f".{folder_of(tmp_path / 'a.gguf', tmp_path / 'cache').name}.tmp-killed"
    anothers = models / ".gguf-0123456789abcdef.tmp-at-work"
    for path in (left, anothers):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"half")
    gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", silent)
    assert (left.exists(), anothers.exists()) == (False, True)


def test_parts_that_do_not_fit_are_named(q4_1: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(q4_1[0], tmp_path / "model"))
    file, name = folder / "model.safetensors", NAMES["blk.0.ffn_down"]
    whole = load_file(file)

    def refused(message: str, change: dict[str, torch.Tensor | None]) -> None:
        save_file({key: value for key, value in (whole | change).items() if value is not None}, file)
        with pytest.raises(SettingsError, match=message):
            check_model_folder(folder)

    refused(r"down_proj\.weight\.scales: F32 of shape", {f"{name}.scales": whole[f"{name}.scales"].float()})
    refused(r"down_proj\.weight\.integers: U8 of shape", {f"{name}.integers": whole[f"{name}.integers"][:, 1:].clone()})
    refused(r"down_proj\.weight: is missing", {f"{name}.minima": None})
    refused(r"down_proj\.weight: is there as floats and as integers", {name: torch.zeros(HIDDEN, FFN)})
    refused(r"embed_tokens\.weight\.scales: is not part", {f"{EMBEDDING}.scales": torch.zeros(8, 2)})


def test_more_layers_than_tensors_are_told_before_anybody_counts_to_them(
    q4_1: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(q4_1[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**32 - 1}))
    with pytest.raises(SettingsError, match=r"config\.json: num_hidden_layers is 4294967295, where the files hold"):
        check_model_folder(folder)


def test_a_stack_is_told_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", Q4_1)
    env = {"BATON_CACHE": str(tmp_path / "cache")}
    settings = load_settings({"model.path": str(tmp_path / "a.gguf")}, {}, None).settings
    assert list(problems(LoadedSettings(settings, {}), set())) == []
    told = with_models(settings, env, silent)
    assert Path(told.model.path) == folder_of(tmp_path / "a.gguf", tmp_path / "cache")
    missing = load_settings({"model.path": str(tmp_path / "b.gguf")}, {}, None).settings
    assert "no such file" in "".join(problems(LoadedSettings(missing, {}), set()))
    with pytest.raises(SettingsError, match=r"b\.gguf does not exist"):
        with_models(missing, env, silent)


def refused(path: Path) -> str:
    """What is said about a file that cannot be read: one line, soon, and nothing is kept of it."""
    with pytest.raises(SettingsError) as caught:
        gguf_folder(path, path.parent / "cache", silent)
    assert caught.value.message.startswith(str(path))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < len(str(path)) + 400
    assert not [left for left in (path.parent / "cache").rglob("*") if left.suffix != ".lock" and left.is_file()]
    return caught.value.message


def changed(path: Path, after: bytes, skip: int, new: bytes) -> Path:
    """A written file with bytes replaced, `skip` behind the end of a name in it."""
    write(path, Q4_1)
    data = bytearray(path.read_bytes())
    first = data.index(after) + len(after) + skip
    data[first : first + len(new)] = new
    path.write_bytes(data)
    return path


HUGE = (2**62).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("after", "skip", "new", "message"),
    [
        # name, type of the field, type of its entries, how many
        (b"tokenizer.ggml.tokens", 8, HUGE, "it ends before"),
        (b"tokenizer.ggml.token_type", 8, HUGE, "it ends before"),
        (b"tokenizer.ggml.merges", 4, b"\0\0\0\0" + HUGE, "it ends before|entries"),
        (b"GGUF\x03\0\0\0", 0, HUGE, "it ends before"),  # tensors
        (b"GGUF\x03\0\0\0", 8, HUGE, "it ends before"),  # fields
        (b"general.architecture", 12, b"ll\nma", r"general\.architecture: 'll.nma' is not supported"),
        (b"eos_token_id", 4, b"\x63", r"tokenizer\.ggml\.eos_token_id: 99 is none of 8 tokens; tokenizer_config\.json"),
        (b"llama.attention.head_count", 4, b"\0\0\0\0", r"its fields make no config\.json"),
        (b"llama.attention.head_count", 4, b"\x1e\0\0\0", r"blk\.0\.attn_q\.weight: is no matrix for 30 heads"),
        # name, dimensions, their sizes, type, offset
        (b"blk.0.ffn_up.weight", 0, b"\xff\xff\xff\xff", "it ends before"),
        (b"blk.0.ffn_up.weight", 4, HUGE, "not a GGUF file"),
        (b"blk.0.ffn_up.weight", 12, b"\0", r"blk\.0\.ffn_up\.weight: is no matrix, its shape is \(0, 64\)"),
        (b"blk.0.ffn_up.weight", 24, HUGE, "it ends before"),
        (b"blk.0.ffn_up", -3, b"\n", r"blk\.0\.ffn.up\.weight: is not part of a Llama"),
    ],
)
def test_a_file_that_lies_is_told_from_a_good_one_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bytes, skip: int, new: bytes, message: str
) -> None:
    monkeypatch.setattr("shared.model.gguf_reader.MOST_READS", 20_000)
    assert re.search(message, refused(changed(tmp_path / "a.gguf", after, skip, new)))


@pytest.mark.parametrize("share", [0.001, 0.02, 0.05, 0.1, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_not_read(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.gguf"
    write(path, Q4_1)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "is not a GGUF file that can be read" in refused(path)


def test_arrays_in_arrays_without_end_are_told(tmp_path: Path) -> None:
    one_of_arrays = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    field = (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little")
    (tmp_path / "a.gguf").write_bytes(head + field + one_of_arrays * 50_000)
    assert "is not a GGUF file that can be read" in refused(tmp_path / "a.gguf")


def test_numbers_in_the_other_byte_order_are_not_taken_for_ones_in_this(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "in the byte order of another machine" in refused(tmp_path / "a.gguf")


@pytest.mark.parametrize("field", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_positions_that_are_scaled_without_a_name_are_not_taken_for_plain_ones(field: str) -> None:
    fields: dict[str, Any] = {"llama.attention.head_count": 1, field: 4.0}
    with pytest.raises(NotTold, match=rf"{field}: 4\.0 is not supported"):
        model_config(fields)
