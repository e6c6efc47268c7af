"""How a stack starts, refuses to start, and stops, through the `./baton` script; with fake workers or a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.state import StackRecord
from tests.servers import NatsServer, RedisServer
from tests.stack.running import Baton
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import CHATML, tokenizer_json

START_CPU_S = 30.0
"""Processor time a start on warm caches may take: with two cores, well within the 20 s promised on an idle machine.
Time on the clock would tell who else computes here."""


def make_model_folder(folder: Path, **changes: Any) -> Path:
    """A tiny Llama checkpoint with its tokenizer, as a user would bring one."""
    make_tiny_model(folder, **changes)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    settings = {"chat_template": CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.model
def test_a_warm_start_serves_and_a_second_one_is_refused(stack: Baton, own: Baton) -> None:
    # Given a stack that runs, when another is started on the same state folder
    second = stack.run("up", "--port", "0")
    # Then it says so, names the process and the way out, and harms nobody
    assert stack.record is not None
    assert second.returncode == 1
    assert second.stderr.count("baton:") == 1
    assert f"already runs on state folder {stack.folder} (process {stack.record.pid})" in second.stderr
    assert "./baton down" in second.stderr
    assert stack.answers()
    # When one is started elsewhere with warm caches
    started = time.monotonic()
    own.up()
    took = time.monotonic() - started
    # Then it is ready soon, and the two do not meet
    work = own.cpu_s()
    print(f"\nstart on warm caches: {took:.1f} s, {work:.1f} s of processor time")
    assert work < START_CPU_S
    assert own.answers()
    assert stack.answers()
    traces = own.traces_outside()
    own.down()
    own.nothing_left(traces)
    assert stack.answers()


@pytest.mark.model
def test_fakes_are_labelled_and_ctrl_c_leaves_nothing(own: Baton, default_model_dir: Path) -> None:
    # Given a stack of fake workers in the foreground
    process = subprocess.Popen(
        own.command("up", "--fake", "--port", "0"),
        env=own.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.strip().startswith("-H"):
            break
    # Then the screen says that tokens are made up, and shows address, key and a curl line
    screen = "".join(lines)
    assert "FAKE WORKERS: tokens are made up" in screen
    assert f"http://127.0.0.1:{_port(screen)}" in screen
    assert "sk-baton-" in screen
    # And so do the status and the trace of a request
    found = json.loads((own.folder / "stack.json").read_text())
    own.record = StackRecord(**found)
    assert own.answers()
    answer = own.openai().completions.create(model="smollm2-135m-instruct", prompt="Hi", max_tokens=2)
    spans = {span["name"]: span for span in own.trace(answer.id, "decode.reserve", "decode.run")}
    assert spans["decode.reserve"]["attributes"]["baton.fake"] is True
    assert spans["decode.run"]["attributes"]["baton.fake"] is True
    assert "fake=true" in own.run("trace", answer.id).stdout
    assert own.openai().models.list().data[0].owned_by == "baton, fake workers"
    status = own.run("status").stdout.splitlines()
    assert [line.split()[-1] for line in status if line.startswith(("decode", "prefill"))] == ["fake", "fake"]
    # When Ctrl-C is pressed
    traces = own.traces_outside()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    # Then it ends well and leaves nothing
    assert process.returncode == 0, errors
    assert "stopped" in errors
    assert "Traceback" not in errors
    own.nothing_left(traces)
    assert "no stack is running" in own.run("status").stderr


def _port(screen: str) -> str:
    return screen.partition("http://127.0.0.1:")[2].split()[0]


def test_a_local_checkpoint_is_served_on_servers_that_are_there(
    own: Baton, tiny_model: Path, nats_server: NatsServer, redis_server: RedisServer
) -> None:
    # Given a NATS and a Redis that run already
    own.env |= {"NATS_URL": nats_server.url, "REDIS_URL": redis_server.url}
    # When a checkpoint of the user's own is served
    own.up("--model", str(tiny_model))
    # Then it goes by its folder's name, and the same seed gives the same text
    client = own.openai()
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    texts = {
        client.chat.completions.create(
            model="tiny-llama", messages=[{"role": "user", "content": "hi user"}], max_tokens=12, seed=3
        )
        .choices[0]
        .message.content
        for _ in range(2)
    }
    assert len(texts) == 1
    # And no server was started beside the ones given
    names = " ".join(own.processes().values())
    assert "nats-server" not in names
    assert "valkey-server" not in names
    traces = own.traces_outside()
    own.down()
    own.nothing_left(traces)
    # While the given ones still run
    assert nats_server.process is not None
    assert redis_server.process is not None
    assert nats_server.process.poll() is None
    assert redis_server.process.poll() is None


BROKEN = {
    "another architecture": ("config.json", '"LlamaForCausalLM"', '"MistralForCausalLM"', "config.json: architectures"),
    "broken config": ("config.json", "{", "{{", "config.json is not JSON"),
    "a field of another type": ("config.json", '"num_hidden_layers": 4', '"num_hidden_layers": "four"', "num_hidden_"),
    "no config": ("config.json", "", "", "config.json"),
    "no tokenizer": ("tokenizer.json", "", "", "has no tokenizer.json"),
    "no weights": ("model.safetensors", "", "", "has no model.safetensors"),
}


@pytest.mark.parametrize(("file", "old", "new", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_folder_that_cannot_be_served_is_one_plain_line(
    own: Baton, tiny_model: Path, tmp_path: Path, file: str, old: str, new: str, words: str
) -> None:
    # Given a model folder in which one file is missing or says something else
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        if path.name != file:
            (folder / path.name).symlink_to(path)
        elif old:
            text = path.read_text()
            assert old in text
            (folder / file).write_text(text.replace(old, new, 1))
    # When it is to be served, then one line names file and field, and nothing runs
    done = own.run("up", "--port", "0", "--model", str(folder))
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("baton:"))
    assert done.returncode == 2
    assert str(folder) in line
    assert words in line
    assert "Traceback" not in done.stderr
    assert not own.processes()
    assert not (own.folder / "stack.json").exists()


def test_weights_that_do_not_fit_the_configuration_end_the_start(own: Baton, tiny_model: Path, tmp_path: Path) -> None:
    # Given a checkpoint whose configuration promises another shape
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((tiny_model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    # When it is to be served, then file and tensor are named before anything has started
    done = own.run("up", "--port", "0", "--detach", "--json", "--model", str(folder))
    assert done.returncode == 2
    assert f"baton: {folder / 'model.safetensors'}: model.layers.0.mlp" in done.stderr
    assert "should be (96, 64) by config.json" in done.stderr or "should be (64, 96) by config.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert not own.processes()


def test_an_unknown_setting_is_refused_with_its_line(own: Baton, tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("schema = 1\n[engine]\ndepth = 1\nthread = 2\n")
    done = own.run("up", "--config", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith(f"baton: {file}:4: unknown field 'thread' in [engine]")
    assert not own.processes()


def test_nothing_answers_after_down(own: Baton, tiny_model: Path) -> None:
    record = own.up("--model", str(tiny_model), "--fake")
    assert httpx.get(f"{record.url}/ready", timeout=10).json()["status"] == "ready"
    traces = own.traces_outside()
    own.down()
    own.nothing_left(traces)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{record.url}/health", timeout=5)
    own.down()
