"""A GGUF file as a model folder, made once in the cache: what serves models reads folders only.

    <cache>/models/gguf-<file>/   config, tokenizer and chat template; model.safetensors with the file's own integers

Configuration and tokenizer stand beside the file where they do, else they follow from what the file says of itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.contracts.errors import SettingsError
from shared.model.fetch import locked

SUFFIX = ".gguf"
FORMAT = 2
"""Raised when what is made of a file changes, so that an older folder is made again."""
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_RECORD = "baton_gguf.json"


def is_gguf(path: Path) -> bool:
    """Whether a model's path names a file of this kind, there or not."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def folder_of(path: Path, cache: Path) -> Path:
    """Where the folder of a file is; it may not exist yet."""
    name = hashlib.blake2b(str(path.absolute()).encode(), digest_size=8).hexdigest()
    return cache / "models" / f"gguf-{name}"


def model_folder(path: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder of a model that is given as one or as a file. Raises SettingsError as `gguf_folder`."""
    return gguf_folder(path, cache, say) if is_gguf(path) else path


def gguf_folder(path: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder of a file, made if it is not there, or if the file or what stands beside it has changed.

    Takes as much memory as the file's values, and room on disk: what has 8 bits is kept as float32.

    Raises:
        SettingsError: the file is missing, or not one that is read; or the cache cannot be written. Names the file, and
            the tensor or field.
    """
    folder, stamps = folder_of(path, cache), _stamps(path)
    if _is_made(folder, stamps):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), say):
            if not _is_made(folder, stamps):
                prefix = f".{folder.name}.tmp-"
                for left in folder.parent.glob(f"{prefix}*"):  # by one that was killed: the lock is ours
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as made:
                    target = Path(made) / "folder"
                    target.mkdir()
                    say(f"reading {path.name}")
                    fill_folder(path, target)
                    record = {"format": FORMAT, "source": str(path), "stamps": stamps}
                    (target / _RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                    if folder.exists():
                        shutil.rmtree(folder)
                    target.rename(folder)
    except OSError as exc:
        raise SettingsError(f"cannot keep {path.name} as a folder in {cache}: {exc}", param=str(cache)) from exc
    return folder


def fill_folder(path: Path, folder: Path) -> None:
    """Write what a file holds into an empty folder.

    Raises:
        SettingsError: as `gguf_folder`.
        OSError: the folder cannot be written.
    """
    # imported late: asking whether a folder is there should not cost numpy
    import safetensors

    from shared.model import gguf_tensors
    from shared.model.gguf_reader import open_gguf

    reader, fields = open_gguf(path)
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    for name, document in _documents(path, fields, tied).items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for name in BESIDE:
        if (path.parent / name).is_file():
            shutil.copy(path.parent / name, folder / name)
    tensors = dict(gguf_tensors.stored_tensors(path, reader, fields))
    arrays = {name: stored.values.copy(order="C") for name, stored in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=tensors[name].dtype, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes
        )
        for name, values in arrays.items()
    }
    try:
        safetensors.serialize_file(specs, folder / "model.safetensors", metadata={"format": "pt"})
    except safetensors.SafetensorError as exc:
        # its only cause here is the file system
        raise OSError(str(exc)) from exc


def _documents(path: Path, fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """What the file says of itself, by file name, but for what stands beside it."""
    from shared.model import convert_gguf as c
    from shared.model.gguf_reader import plain

    architecture = fields.get("general.architecture")
    if architecture != "llama":
        told = f"{path}: general.architecture: {plain(repr(architecture))} is not supported"
        raise SettingsError(told, param=path.name)
    makers: dict[str, Callable[[], Any]] = {
        "config.json": lambda: {**c.model_config(fields), "tie_word_embeddings": tied},
        "generation_config.json": lambda: c.generation_config(fields),
        "tokenizer.json": lambda: c.tokenizer_model(fields),
        "tokenizer_config.json": lambda: c.tokenizer_config(fields),
    }
    documents: dict[str, Any] = {}
    for name, make in makers.items():
        if (path.parent / name).is_file():
            continue
        try:
            documents[name] = make()
        except KeyError as exc:
            told = f"{path}: {exc.args[0]}: is missing; {name} beside the file would do instead"
            raise SettingsError(told, param=str(exc.args[0])) from exc
        except c.NotTold as exc:
            told = f"{path}: {plain(exc)}; {name} beside the file would do instead"
            raise SettingsError(told, param=path.name) from exc
        except (ValueError, LookupError, TypeError, ArithmeticError) as exc:
            told = f"{path}: its fields make no {name}: {plain(exc)}; one beside the file would do instead"
            raise SettingsError(told, param=path.name) from exc
    return documents


def _stamps(path: Path) -> dict[str, list[int]]:
    """Of all that the folder is made of. Raises SettingsError where there is no such file."""
    if not path.is_file():
        raise SettingsError(f"model file {path} does not exist", param=path.name)
    found = {}
    for source in (path, *(path.parent / name for name in BESIDE)):
        if source.is_file():
            status = source.stat()
            found[source.name] = [status.st_size, status.st_mtime_ns]
    return found


def _is_made(folder: Path, stamps: Mapping[str, list[int]]) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return bool(record["format"] == FORMAT and record["stamps"] == stamps)
    except (OSError, ValueError, KeyError, TypeError):
        return False
