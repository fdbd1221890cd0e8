"""Every start that vLLM would end with a stack, and that can be known before, ends with one line and status 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inpage.demo.model import make_model
from inpage.errors import ConfigError
from inpage.serve import checks
from inpage.serve.arguments import ServerArguments
from inpage.serve.weights import INDEX, weights_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def refused(*arguments: str) -> str:
    """What `inpage serve` says in one line of its own; it must end before anything has started."""
    command = [sys.executable, "-m", "inpage", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("inpage: ")
    return line


def change_config(model: Path, **values: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_port_that_is_taken_is_one_line_with_a_free_one(model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused(str(model), "--host", "127.0.0.1", "--port", str(port))
    assert f"port {port} of 127.0.0.1 is taken by another program: give another --port, " in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "192.0.2.1"], r"port 8000 of 192\.0\.2\.1 cannot be used"),
        (["--host=no-such-host.invalid"], "cannot be used"),
        (["--port", "70000"], "--port 70000 is no port"),
        (["--uds", "/no/such/folder/socket"], "there is no folder /no/such/folder"),
    ],
)
def test_an_address_where_nothing_can_listen_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        checks.refuse_address(ServerArguments(arguments))


def test_a_socket_that_is_there_is_refused_and_a_new_one_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is at most 107 bytes
    checks.refuse_address(ServerArguments(["--uds", "socket"]))
    assert not Path("socket").exists()
    Path("socket").touch()
    with pytest.raises(ConfigError, match="--uds socket is there already"):
        checks.refuse_address(ServerArguments(["--uds", "socket"]))


def test_a_folder_without_weights_is_one_line_unless_they_may_be_random(model):
    (model / "model.safetensors").unlink()
    assert f"{model} has no weights (*.safetensors, *.bin, *.pt): put" in refused(str(model))
    assert weights_bytes(model, "dummy") is None


def test_a_download_that_ended_early_is_refused_with_what_is_missing(model):
    whole = (model / "model.safetensors").stat().st_size
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 files of weights .* names, second\.safetensors among"):
        weights_bytes(model)
    (model / INDEX).unlink()
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(whole - 10)
    with pytest.raises(ConfigError, match=f"is cut short: {whole - 10:,} of {whole:,} bytes"):
        weights_bytes(model)
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="it is a pointer of Git LFS"):
        weights_bytes(model)


def test_weights_are_counted_from_the_headers(model):
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert weights_bytes(model) == sum(one.nbytes for one in tensors)
    assert weights_bytes(model, dtype="float32") == sum(4 * one.numel() for one in tensors)


def test_a_folder_without_a_config_is_one_line(model):
    (model / "config.json").unlink()
    assert "config.json (No such file or directory): give" in refused(str(model))


def test_a_config_that_is_not_json_is_one_line(model):
    (model / "config.json").write_text('{"architectures": ')
    assert "config.json is not JSON: Expecting value" in refused(str(model))


def test_an_architecture_that_vllm_does_not_have_is_one_line(model):
    change_config(model, architectures=["Qwen9NextForCausalLM"])
    assert "config.json: this vLLM has no architecture Qwen9NextForCausalLM. Use a release" in refused(str(model))
    change_config(model, architectures=[])
    assert "names no architectures" in refused(str(model))


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_architectures_of_hybrids_are_known_without_an_import(model, name):
    change_config(model, architectures=[name])
    checks.refuse_folder(model, ServerArguments([]), {})


def test_a_folder_without_a_tokenizer_is_one_line_unless_another_has_it(model, tmp_path):
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert f"{model} has no tokenizer (tokenizer.json" in refused(str(model))
    checks.refuse_folder(model, ServerArguments(["--tokenizer", str(tmp_path)]), {})
    checks.refuse_folder(model, ServerArguments(["--skip-tokenizer-init"]), {})


def test_a_path_that_is_no_folder_is_not_taken_for_a_name_on_the_hub(model):
    assert "There is no folder ./no/such/model: give a model's folder" in refused("./no/such/model")
    assert "is a file: give the model's folder" in refused(__file__)
    assert "config.json is a file: give the model's folder" in refused(str(model / "config.json"))


def test_without_vllm_the_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed for this Python"):
        checks.refuse_missing_engine()
