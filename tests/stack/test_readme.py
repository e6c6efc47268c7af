"""Every example of README.md, run as it stands. One that is added or changed without a test here is an error."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.state import StackRecord
from shared.settings.load import ROOT, load_settings
from tests.stack.running import MODEL, UP_S, Baton, until
from tests.stack.test_lifecycle import make_model_folder

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

README = (ROOT / "README.md").read_text()
ON_A_STACK = {
    './baton chat "What is the capital of France?"': "",
    "./baton batch submit jobs.jsonl --watch": "completed",
    "./baton batch list": "completed",
    "./baton trace": MODEL[:12],
    "./baton top --once": "decode-",
    "./baton logs -n 20": "gateway",
    "./baton status": "scheduler",
    "./baton restart decode": "decode-1: restarted",
    "./baton keys show": "admin",
    "./baton keys create acme": "sk-baton-",
    "./baton keys terms acme --weight 4 --class analysis": "analysis",
    "./baton keys list": "acme",
    "./baton purge --tenant acme": "purge",
    "./baton config check": "baton.toml: ok",
    "./baton doctor": "./baton up can start here",
    "./baton down": "stopped",
}
"""Command to a word of what it prints, in the order of a first day; `down` ends it."""
STARTING = {"./baton up", "./baton up --detach --json", "./baton up --model PATH", "./baton up --quant int8"}
ELSEWHERE = {
    "./baton test": "what runs this very test",
    "./baton bench smoke": "test_bench_smoke, in the long run",
    "./baton bench engine": "unit/test_engine_bench",
    "./baton bench speculation": "unit/test_speculation_bench",
    "./baton bench peers": "unit/test_peers",
}


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language; "" for commands, the drawing and the tree."""
    parts = README.split("\n```")
    return [body for tag, _, body in (part.partition("\n") for part in parts[1::2]) if tag == language]


def commands() -> list[str]:
    """Command lines of the README, continued lines joined, comments removed."""
    told = [block for block in blocks("") if "./baton" in block]
    text = "\n".join(told).replace("\\\n", "")
    return [re.sub(r"\s+# .*$", "", line).strip() for line in text.splitlines() if line.strip()]


@pytest.fixture
def desk(tmp_path: Path, default_model_dir: Path) -> Iterator[Baton]:
    """A folder to work in that has `./baton`, for stacks of fake workers."""
    (tmp_path / "baton").symlink_to(ROOT / "baton")
    baton = Baton(tmp_path / "state", {"BATON_GATEWAY_PORT": "0", "BATON_WORKERS_FAKE": "true"})
    try:
        yield baton
    finally:
        baton.kill_all()


def shell(baton: Baton, command: str, timeout_s: float = UP_S) -> str:
    """Run a command line in the desk's folder; what it printed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=baton.folder.parent,
        env=baton.env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_every_example_has_a_test() -> None:
    known = {*ON_A_STACK, *STARTING, *ELSEWHERE}
    others = [line for line in commands() if line not in known]
    assert [line.split()[0] for line in others] == [
        "echo",
        'KEY="sk-baton-$(openssl',
        "printf",
        "BATON_POLICY_TENANTS=tenants.json",
    ]
    assert known <= set(commands())
    assert len(blocks("python")) == len(blocks("toml")) == 1
    assert "./baton test" in (ROOT / ".ci" / "run").read_text()


def test_a_first_day(desk: Baton) -> None:
    desk.record = StackRecord(**json.loads(shell(desk, "./baton up --detach --json 2>/dev/null")))
    # The program, with the address and key of this stack
    program = blocks("python")[0]
    assert "http://127.0.0.1:8080" in program
    assert 'api_key="..."' in program
    program = program.replace("http://127.0.0.1:8080", desk.url).replace('"..."', f'"{desk.record.api_key}"')
    file = desk.folder.parent / "client.py"
    file.write_text(program)
    assert shell(desk, f"{ROOT}/.venv/bin/python client.py").strip()
    # The commands, one after the other
    (jobs,) = (line for line in commands() if line.startswith("echo "))
    shell(desk, jobs)
    for command, word in ON_A_STACK.items():
        printed = shell(desk, command)
        assert word in printed, f"{command}: {printed}"
        assert printed.strip(), command


def test_up_in_the_foreground(desk: Baton) -> None:
    process = subprocess.Popen(
        ["./baton", "up"],
        cwd=desk.folder.parent,
        env=desk.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    until(lambda: "Baton is ready at" in (process.stdout.readline() if process.stdout else ""), UP_S)
    shell(desk, "./baton down")
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_integer_weights(desk: Baton) -> None:
    shell(desk, "BATON_WORKERS_FAKE=false ./baton up --quant int8 --detach --json")
    assert "int8" in shell(desk, "./baton status")
    assert "Paris" in shell(desk, './baton chat --temperature 0 "What is the capital of France?"')
    shell(desk, "./baton down")


def test_a_model_of_ones_own(desk: Baton, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "mine")
    shell(desk, f"BATON_WORKERS_FAKE=false ./baton up --model {folder} --detach --json")
    assert "mine" in shell(desk, "./baton status --json") + shell(desk, "./baton chat Hello; ./baton trace")
    shell(desk, "./baton down")


def test_tenants_of_a_file(desk: Baton) -> None:
    (block,) = (block for block in blocks("") if block.startswith("KEY="))
    script = block.replace("./baton up", "./baton up --detach --json")
    answer = shell(desk, f'set -e\n{script}\necho; echo "$KEY"')
    record = StackRecord(**json.loads(next(line for line in answer.splitlines() if line.startswith("{"))))
    key = next(line for line in answer.splitlines() if line.startswith("sk-baton-"))
    desk.record = record
    answers = desk.openai(key).completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert answers.usage is not None
    assert os.stat(desk.folder.parent / "tenants.json").st_mode & 0o777 == 0o600
    shell(desk, "./baton down")


def test_the_settings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(blocks("toml")[0])
    assert [model.name for model in load_settings(file=file).settings.models] == ["small", "large"]


@pytest.mark.long
def test_bench_smoke(desk: Baton) -> None:
    printed = shell(desk, "BATON_WORKERS_FAKE=false ./baton bench smoke")
    assert "TTFT" in printed
