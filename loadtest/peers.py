"""`./baton bench peers`: this engine and its peers on the same weights and the same work, in turn.

Contestants of the same weights are loaded together, each in processes of its own, and take turns cell by cell and
round by round; starting is not measured. A sample that other processes disturbed is taken again, and counted.
A peer that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.bench import turns
from loadtest.contestants import BatchedBench, BatonStack, Contestant, EngineProcess, HttpServer
from loadtest.machine import ForeignLoad, processor_s, this_machine
from loadtest.peer_environments import LLAMA, VLLM, WHAT, Environments
from loadtest.peer_floor import floor
from loadtest.peer_plan import BATON, PEERS, QUANTS, TRANSFORMERS, VLLM_BF16, Cell, all_cells, chosen, groups
from loadtest.peer_plan import LLAMA as LLAMA_CPP
from loadtest.peer_plan import VLLM as VLLM_CPU
from loadtest.peer_report import Sample, figures, ratios, text_of
from loadtest.peer_weights import RANDOM, Weights
from shared.contracts.errors import BatonError, Internal
from shared.model.fetch import cache_dir

ROUNDS, RETRIES = 3, 1
WARM_TOKENS = 4

Make = Callable[[str, str], Contestant]
"""(contestant, way) → something to start."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    cache = cache_dir(os.environ)
    environments = Environments(cache)
    # what was started must be stopped
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.install:
            install(environments, cache)
            return 0
        report = run(options, environments, cache)
        print(text_of(report))
        if options.json:
            write(options.json, report)
        if options.png:
            draw(environments, report, options.png)
        return 1 if report["failed"] else 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BatonError, ValueError) as exc:
        print(f"baton bench: {exc.message if isinstance(exc, BatonError) else exc}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def install(environments: Environments, cache: Path) -> None:
    """Make environments and weights that are not there. Raises BatonError when one cannot be made."""
    environments.install(say)
    for (model, quant), cells in groups(all_cells()).items():
        weights = Weights(model, cache, environments.llama("llama-quantize"), say)
        weights.gguf(quant)
        weights.baton_of(quant)
        if quant == "int8" and any(VLLM_CPU in cell.contestants() for cell in cells):
            weights.vllm_int8()
    say(f"all is in {environments.folder}")


def run(options: argparse.Namespace, environments: Environments, cache: Path) -> dict[str, Any]:
    """Every contestant in every cell, round after round.

    Raises:
        BatonError: weights cannot be made.
        ValueError: no such cell, or a file to resume from that is none.
    """
    cells = chosen(options.cells)
    threads = options.threads or len(os.sched_getaffinity(0))
    missing = environments.missing() + ([] if _has_transformers() else ["transformers (requirements/test.txt)"])
    no_vllm = VLLM in missing
    absent = {VLLM_CPU: no_vllm, VLLM_BF16: no_vllm, LLAMA_CPP: LLAMA in missing, TRANSFORMERS: not _has_transformers()}
    names = [BATON, *(name for name in options.peers if not absent[name])]
    before = read(options.json) if options.resume and options.json else {}
    samples = [Sample(**one) for one in before.get("samples", [])]
    floors: list[dict[str, Any]] = before.get("floors", [])
    failed: dict[str, str] = {}

    def report() -> dict[str, Any]:
        return {
            "bench": "peers",
            "threads": threads,
            "seed": options.seed,
            "rounds": options.rounds,
            "machine": this_machine().body(),
            "missing": missing,
            "failed": failed,
            "figures": figures(samples),
            "ratios": ratios(samples),
            "floors": floors,
            "samples": [asdict(one) for one in samples],
        }

    for (model, quant), some in groups(cells).items():
        weights = Weights(model, cache, environments.llama("llama-quantize"), say)
        with Field(makers(weights, quant, threads, environments, options)) as field:
            for number in range(1, options.rounds + 1):
                for cell in some:
                    jobs = cell.jobs(weights.vocab_size(), options.seed, number, options.requests)
                    entered = [name for name in cell.contestants() if name in names]
                    for name in turns(entered, number):
                        who = f"{name}, {model}, {quant}, {cell.way}"
                        if has(samples, cell, name, number) or who in failed:
                            continue
                        say(f"round {number} of {options.rounds}, {cell.name}: {name}")
                        try:
                            samples += field.measure(cell, name, number, jobs, options.retries)
                        except (BatonError, ValueError) as exc:
                            # the others' figures are worth having without it
                            failed[who] = exc.message if isinstance(exc, BatonError) else str(exc)
                            say(f"{who}: {failed[who]}")
                        if options.json:
                            write(options.json, report())
        if (
            options.floor
            and model == RANDOM
            and not any((one["model"], one["quant"]) == (model, quant) for one in floors)
        ):
            say(f"{model}, {quant}: shares of what the machine gives")
            try:
                floors.append(floor(model, weights.baton(), quant, threads, options.floor_seconds))
            except BatonError as exc:
                failed[f"shares, {model}, {quant}"] = exc.message
            if options.json:
                write(options.json, report())
    return report()


class Field:
    """The contestants of one group: each is started when it is first needed, and all end with the group."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._there: dict[tuple[str, str], Contestant] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, cell: Cell, name: str, number: int, jobs: Sequence[Any], retries: int) -> list[Sample]:
        """Samples of a cell until one is clean, at most `retries` more than one."""
        contestant = self._started(name, cell.way, jobs)
        found: list[Sample] = []
        while len(found) <= retries and not (found and found[-1].clean):
            pids = contestant.pids()
            load, before = ForeignLoad(*pids, children=False), processor_s(*pids)
            result = contestant.run(jobs, cell.width)
            cpu_s = processor_s(*pids) - before if pids else None
            found.append(Sample(cell.name, name, number, contestant.build, result, load.cores(), cpu_s))
        return found

    def _started(self, name: str, way: str, jobs: Sequence[Any]) -> Contestant:
        # an engine's process runs loops and batches alike; llama.cpp alone has a program for each
        key = (name, way if way == "http" or name == LLAMA_CPP else "engine")
        if key not in self._there:
            say(f"starting {name}, {key[1]}")
            contestant = self._make(*key)
            self._stack.callback(contestant.stop)
            contestant.start()
            if contestant.pids():
                # what is compiled or allocated lazily is paid for first
                warm = [type(job)(tuple(reversed(job.prompt)), WARM_TOKENS) for job in jobs[:2]]
                contestant.run(warm, 2)
            self._there[key] = contestant
        return self._there[key]


def makers(weights: Weights, quant: str, threads: int, environments: Environments, options: argparse.Namespace) -> Make:
    """How each contestant of a group is made."""
    own_quant = "none" if quant == "bf16" else quant
    budget = ["--token-budget", str(options.token_budget)] if options.token_budget else []
    bind = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}

    def drivers(module: str, *more: str) -> list[str]:
        command = [sys.executable, "-m", f"loadtest.{module}", "--model", str(weights.baton_of(quant))]
        return [*command, "--threads", str(threads), *more]

    def vllm_folder(name: str) -> Path:
        return weights.vllm_int8() if (name, quant) == (VLLM_CPU, "int8") else weights.baton()

    def make(name: str, way: str) -> Contestant:
        if (name, way) == (BATON, "engine"):
            return EngineProcess(drivers("peer_baton", "--quant", own_quant, *budget))
        if (name, way) == (BATON, "http"):
            settings = stack_settings(weights.baton_of(quant), own_quant, threads, options.token_budget, options.set)
            return BatonStack(settings, f"stack, quant {own_quant}")
        if name in (VLLM_CPU, VLLM_BF16) and way == "engine":
            script = str(Path(__file__).with_name("peer_vllm.py"))
            command = [str(environments.vllm), "-I", script, "--model", str(vllm_folder(name))]
            return EngineProcess([*command, "--threads", str(threads)], bind)
        if (name, way) == (VLLM_CPU, "http"):
            return HttpServer([str(environments.vllm), *vllm_arguments(vllm_folder(name))], f"{VLLM} serve", bind)
        if (name, way) == (LLAMA_CPP, "batch"):
            return BatchedBench(environments.llama("llama-batched-bench"), weights.gguf(quant), threads, LLAMA)
        if (name, way) == (LLAMA_CPP, "http"):
            command = [str(environments.llama("llama-server")), *llama_arguments(weights.gguf(quant), threads)]
            return HttpServer(command, f"{LLAMA} server", more={"cache_prompt": False})
        if (name, way) == (TRANSFORMERS, "engine"):
            return EngineProcess(drivers("peer_transformers"))
        raise Internal(f"no {name} by {way}")

    return make


def stack_settings(folder: Path, quant: str, threads: int, budget: int, more: Sequence[str] = ()) -> dict[str, object]:
    """One worker that does all, with all of the machine; a budget of 0 is the settings' own.

    Raises:
        ValueError: a `--set` without a value.
    """
    settings: dict[str, object] = {
        "model.path": folder,
        "model.dtype": "bfloat16",
        "workers.prefill": 0,
        "workers.decode": 1,
        "engine.kernels": "native",
        "engine.quant": quant,
        "engine.threads": threads,
        "engine.max_sequences": 32,
    }
    if budget:
        settings["engine.token_budget"] = budget
    for pair in more:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: expected SECTION.FIELD=VALUE")
        settings[name.strip()] = value
    return settings


def vllm_arguments(folder: Path) -> list[str]:
    """Of vLLM's server, as its engine is run."""
    server = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "{port}"]
    server += ["--model", str(folder), "--served-model-name", HttpServer.MODEL, "--dtype", "bfloat16"]
    server += ["--max-model-len", "2048", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
    return [*server, "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]


def llama_arguments(file: Path, threads: int) -> list[str]:
    """Of llama.cpp's server: 32 slots of the longest request, no cache of prompts."""
    server = ["-m", str(file), "--host", "127.0.0.1", "--port", "{port}", "-t", str(threads), "-tb", str(threads)]
    return [*server, "-np", "32", "-c", str(32 * 640), "-b", "2048", "-ub", "512", "--cache-ram", "0"]


def has(samples: Sequence[Sample], cell: Cell, name: str, number: int) -> bool:
    """Whether a clean sample is there already."""
    return any((one.cell, one.contestant, one.number) == (cell.name, name, number) and one.clean for one in samples)


def read(path: Path) -> Mapping[str, Any]:
    """What an earlier run wrote; nothing where there is no file. Raises ValueError for one of something else."""
    if not path.exists():
        return {}
    body = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(body, dict) or body.get("bench") != "peers":
        raise ValueError(f"--resume: {path} is not of this bench")
    return body


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all: a run may be stopped at any time, and resumed from the file."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)


def draw(environments: Environments, report: Mapping[str, Any], path: Path) -> None:
    """Write the figure. Raises Internal where matplotlib fails, and says how to get it where it is not there."""
    if not environments.plot.exists():
        say("no figure: matplotlib is not there (--install)")
        return
    script = str(Path(__file__).with_name("peer_plot.py"))
    command = [str(environments.plot), "-I", script, str(path.absolute())]
    done = subprocess.run(command, input=json.dumps(report), text=True, capture_output=True, check=False)
    if done.returncode:
        raise Internal(f"the figure could not be drawn: {done.stderr.strip()[-400:]}")


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(f"baton bench: {text}", file=sys.stderr, flush=True)


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench peers",
        description="Measure this engine beside its peers: vLLM, llama.cpp and transformers on the same weights.",
        epilog=f"--install downloads {WHAT}; weights take 4 GB more. All of it lies under the cache folder, in peers/.",
    )
    parser.add_argument("--install", action="store_true", help="make the peers' environments and weights, then end")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help=f"such as '*/int8/*' or '*/c8': MODEL/{'|'.join(QUANTS)}/engine|batch|http/WIDTH (default: all)",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="beside Baton (default: all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of every cell (default {ROUNDS})")
    parser.add_argument("--retries", type=int, default=RETRIES, help=f"of a disturbed sample (default {RETRIES})")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="requests a loop (default 2, 12, 32)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument("--token-budget", type=int, default=0, metavar="N", help="of Baton's steps (default: its own)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="of Baton's stack")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and lengths (default 1)")
    parser.add_argument("--no-floor", dest="floor", action="store_false", help="without shares of the machine's limits")
    parser.add_argument("--floor-seconds", type=float, default=30.0, metavar="S", help="for each weights (default 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there, as it comes")
    parser.add_argument("--resume", action="store_true", help="keep what FILE of --json has, and measure the rest")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the throughputs there")
    return parser
