"""What a checkpoint must hold, checked by the heads of its files: tensors by name, shape and type. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from shared.contracts.errors import SettingsError
from shared.model.config import ModelConfig
from shared.model.folder import INDEX, weight_files, weight_map
from shared.model.packing import ENDS, FIELD

EMBEDDING, HEAD = TIED = "model.embed_tokens.weight", "lm_head.weight"
MOE = "block_sparse_moe"
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS, SCALES, MINIMA = ".integers", ".scales", ".minima"
"""What the names of a matrix's parts end in that is kept as groups of 32 inputs of four bits, value = scale * integer +
minimum: [out, in / 2] uint8, inputs two a byte with the first one low, and [out, in / 32] float16 each."""
GROUP = 32
_PART_TYPES = {INTEGERS: "U8", SCALES: "F16", MINIMA: "F16"}
_PART_INPUTS = {INTEGERS: 2, SCALES: GROUP, MINIMA: GROUP}
_NO_SHAPE = (0, 0)
Shape = tuple[int, ...]
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints carry this table; it follows from the configuration."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold. Of a tied embedding and head, one of the two is enough."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    shapes = _norm_shapes(config)
    if experts := config.family.num_experts:
        mlp = {}
        shapes[f"{MOE}.gate.weight"] = (experts, hidden)
        for i in range(experts):
            shapes |= {f"{MOE}.experts.{i}.{name}.weight": (width, hidden) for name in ("w1", "w3")}
            shapes[f"{MOE}.experts.{i}.w2.weight"] = (hidden, width)
    for block, layers, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
        for name, shape in layers.items():
            shapes[f"{block}.{name}.weight"] = shape
            if bias:
                shapes[f"{block}.{name}.bias"] = shape[:1]
    return shapes


def _norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    family = config.family
    names = ["input_layernorm", "post_attention_layernorm"]
    if family.post_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (config.hidden_size,) for name in names}
    if family.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def check_checkpoint(folder: Path, config: ModelConfig) -> dict[str, Path]:
    """The file of each tensor, after a look at every file's head. Takes well under a second.

    Raises:
        SettingsError: a file is missing or broken, or does not hold what the index says; a tensor is missing, there
            twice, not part of the model, or not of the shape the configuration says. Names file and tensor.
    """
    where: dict[str, Path] = {}
    tensors = list(_tensors(folder))
    if config.num_layers > len(tensors):  # told before a stranger's number is counted up to
        told = f"num_hidden_layers is {config.num_layers}, where the files hold {len(tensors)} tensors"
        raise SettingsError(f"{folder / 'config.json'}: {told}", param="num_hidden_layers")
    expected = expected_shapes(config)
    if config.tied_embeddings:
        expected[HEAD] = expected[EMBEDDING]
    for path, name, shape, dtype in tensors:
        if name in where:
            raise SettingsError(f"{path}: {name}: is also in {where[name].name}", param=name)
        where[name] = path
        if not _is_part(path, name, (shape, dtype), config, expected):
            _check_whole(path, name, (shape, dtype), config, expected)
    for name in expected:
        _require(name, where, folder, config)
    return where


def is_matrix(name: str) -> bool:
    """Whether a tensor is of those that a checkpoint may keep as integers."""
    return name.endswith(("_proj.weight", *(f".w{i}.weight" for i in (1, 2, 3))))


def is_dead_bias(name: str, config: ModelConfig) -> bool:
    """Whether a name is of a bias that the model does not have and some writers of integers add to every matrix.

    Its values must be zero.
    """
    if config.packing is None or not name.endswith("_proj.bias"):
        return False
    return not (config.attention_bias if ".self_attn." in name else config.mlp_bias)


def _is_part(
    path: Path, name: str, found: tuple[tuple[int, ...], str], config: ModelConfig, expected: Mapping[str, Shape]
) -> bool:
    """Whether a tensor is a part of a matrix that is kept as integers. Raises SettingsError for one that cannot be."""
    matrix, part = split(name)
    if part and matrix in expected and matrix.endswith("_proj.weight"):
        _check_part(path, name, found, expected[matrix])
        return True
    if config.packing is None:
        return False
    matrix, end = config.packing.split(name)
    if not end or matrix not in expected or not is_matrix(matrix):
        return False
    should = config.packing.parts(expected[matrix])[end]
    if -1 in should.shape:
        told = f"a matrix {expected[matrix]} does not fill words of {config.packing.per} integers"
        raise SettingsError(f"{path}: {name}: {told}", param=name)
    if found[0] != should.shape or found[1] not in should.dtypes:
        wanted = f"{' or '.join(should.dtypes)} of shape {should.shape}"
        told = f"{found[1]} of shape {found[0]} should be {wanted}, a matrix {expected[matrix]} by {FIELD}"
        raise SettingsError(f"{path}: {name}: {told}", param=name)
    return True


def _check_whole(
    path: Path, name: str, found: tuple[tuple[int, ...], str], config: ModelConfig, expected: Mapping[str, Shape]
) -> None:
    shape, dtype = found
    if is_dead_bias(name, config) and (matrix := f"{name.removesuffix('bias')}weight") in expected:
        expected = {**expected, name: expected[matrix][:1]}
    if name not in expected:
        hint = _hint(name, config)
        raise SettingsError(f"{path}: {name}: is not part of this model{hint}", param=name)
    if shape != expected[name]:
        raise SettingsError(f"{path}: {name}: shape {shape} should be {expected[name]} by config.json", param=name)
    if dtype not in FLOATS:
        raise SettingsError(f"{path}: {name}: dtype {dtype} is not supported, only {', '.join(FLOATS)}", param=name)


def _require(name: str, where: Mapping[str, Path], folder: Path, config: ModelConfig) -> None:
    """Raise SettingsError where a tensor is missing, or there in two ways."""
    own = [name + part for part in _PART_TYPES]
    theirs, needed = _packed_names(name, config)
    if name in where and any(part in where for part in (*own, *theirs)):
        raise SettingsError(f"{where[name]}: {name}: is there as floats and as integers", param=name)
    if name in where or all(part in where for part in own):
        return
    if any(part in where for part in theirs):
        missing = [part for part in needed if part not in where]
        if not missing:
            return
        name = missing[0]
    if config.tied_embeddings and name in TIED and any(other in where for other in TIED):
        return
    files = ", ".join(path.name for path in weight_files(folder))
    hint = "; config.json says tie_word_embeddings is false" if name == HEAD else ""
    raise SettingsError(f"{folder}: {name}: is missing from {files}{hint}", param=name)


def _packed_names(name: str, config: ModelConfig) -> tuple[list[str], list[str]]:
    """Every tensor that a matrix may be kept as by the configuration, and those of them that must be there."""
    if config.packing is None or not is_matrix(name):
        return [], []
    parts = config.packing.parts(_NO_SHAPE)
    stem = name.removesuffix(".weight")
    return [stem + end for end in parts], [stem + end for end, part in parts.items() if part.required]


def split(name: str) -> tuple[str, str]:
    """The matrix that a tensor is a part of, and which part; "" for a whole one."""
    part = next((part for part in _PART_TYPES if name.endswith(part)), "")
    return name.removesuffix(part), part


def _check_part(path: Path, name: str, found: tuple[tuple[int, ...], str], whole: tuple[int, ...]) -> None:
    _, part = split(name)
    should = (whole[0], whole[1] // _PART_INPUTS[part]), _PART_TYPES[part]
    if whole[1] % GROUP or found != should:
        told = f"{path}: {name}: {found[1]} of shape {found[0]} should be {should[1]} of {should[0]}"
        raise SettingsError(f"{told}, a matrix {whole} in groups of {GROUP}", param=name)


def _tensors(folder: Path) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    """(file, name, shape, type) of every tensor that counts, file by file, each file checked against the index."""
    index = weight_map(folder)
    for path in weight_files(folder):
        try:
            with safe_open(str(path), framework="np") as file:
                names = list(file.keys())
                slices = [file.get_slice(name) for name in names]
                found = [
                    (path, n, tuple(s.get_shape()), str(s.get_dtype())) for n, s in zip(names, slices, strict=True)
                ]
        except (SafetensorError, OSError) as exc:
            raise broken(path, exc) from exc
        for name in names:
            if index is not None and index.get(name) != path.name and not name.endswith(_IGNORED_SUFFIX):
                says = f"it is in {index[name]}" if name in index else "nothing of it"
                raise SettingsError(f"{path}: {name}: is here, but {INDEX} says {says}", param=name)
        for name, file_name in (index or {}).items():
            if file_name == path.name and name not in names:
                raise SettingsError(f"{path}: {name}: is missing here, where {INDEX} says it is", param=name)
        yield from (entry for entry in found if not entry[1].endswith(_IGNORED_SUFFIX))


def _hint(name: str, config: ModelConfig) -> str:
    if config.packing is None and name.endswith(ENDS):
        return f": config.json has no {FIELD}"
    for block, field, given in (
        ("self_attn", "attention_bias", config.attention_bias),
        ("mlp", "mlp_bias", config.mlp_bias),
    ):
        if name.endswith(".bias") and f".{block}." in name and not given:
            return f": config.json says {field} is false"
    return ""


def broken(path: Path, exc: Exception) -> SettingsError:
    return SettingsError(f"cannot read weights from {path}: {exc}", param=path.name)
