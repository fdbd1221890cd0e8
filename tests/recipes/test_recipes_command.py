"""`inpage recipe` from the outside: lists, prints, refuses, runs."""

from __future__ import annotations

import os

import pytest
import yaml
from typer.testing import CliRunner

from inpage.cli import app
from inpage.errors import ConfigError
from inpage.recipes import launch
from inpage.recipes.library import LIBRARY, find, names


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["recipe", *arguments], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_without_a_name_every_recipe_is_listed() -> None:
    output = run()
    assert all(name in output for name in names())
    assert "288,446" in output


def test_one_is_printed_with_command_reasons_figures_and_gates() -> None:
    output = run("qwen3.8-27b-gaudi2", "--profile", "v0.26.0")
    for text in (
        "VLLM_COMPACT_GDN=1 vllm serve Qwen/Qwen3.8-27B --enable-prefix-caching --max-model-len 262144",
        "python3 fixes/apply_all.py --profile v0.26.0 gdn-prefix-cache",
        "a checkpoint at every boundary",
        "896 tokens",
        "329 of 56.00 MiB",
        "14, 685.12 MiB",
        "inpage gate http://127.0.0.1:8000",
        "nothing yet",
    ):
        assert text in output, text
    assert "INPAGE_ACCEPT_UNVERIFIED" not in output
    assert "INPAGE_ACCEPT_UNVERIFIED=1" in run("qwen3.8-27b-gaudi2", "--profile", "v0.30.0")


@pytest.fixture
def write(tmp_path):
    """Write a changed copy of a recipe; `changes` replace fields by their dotted path."""

    def write(changes: dict, name: str = "demo-cpu", file: str = "demo-cpu.yaml"):
        data = yaml.safe_load((LIBRARY / f"{name}.yaml").read_text())
        for path, value in changes.items():
            *parents, last = path.split("/")
            inner = data
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
        target = tmp_path / file
        target.write_text(yaml.safe_dump(data))
        return str(target)

    return write


def test_a_recipe_of_ones_own_is_read_from_its_file(write) -> None:
    assert "My own" in run(write({"title": "My own"}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"flgs": []}, "flgs: Extra inputs are not permitted"),
        ({"device": "gpu"}, "device: Input should be 'gaudi2' or 'cpu'"),
        ({"expected/num_blocks": "many"}, "expected.num_blocks: Input should be a valid integer"),
        ({"flags": [{"flag": "--x"}]}, "flags.0.why: Field required"),
        ({"flags": [{"flag": "x", "why": "y"}]}, "flags.0.flag"),
        ({"profiles": {}}, "profiles"),
        ({"gates": []}, "gates"),
        ({"model": "Qwen/Qwen3.8-27B"}, "either model"),
        ({"name": "other"}, "name is 'other', the file says 'demo-cpu'"),
        (
            {"profiles/v0.30.0/flags": [{"flag": "--max-num-seqs", "value": 1, "why": "z"}]},
            "profile v0.30.0 gives --max-num-seqs twice",
        ),
    ],
)
def test_a_field_that_is_wrong_is_named_with_the_file(write, changes, why) -> None:
    file = write(changes)
    with pytest.raises(ConfigError) as error:
        find(file)
    assert file in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pool/memory": "much"}, "not a memory size"),
        ({"made": {"layers": 4, "wheels": 4}}, "wheels"),
        ({"made": {"layers": 3}}, "not a hybrid"),
        ({"flags": [{"flag": "--max-num-seqs", "value": 4, "why": "y"}]}, "the plan needs --max-model-len"),
        ({"pool/memory": "64KiB"}, "the largest that fits is"),
    ],
)
def test_figures_that_cannot_be_planned_say_why(write, changes, why) -> None:
    with pytest.raises(ConfigError, match=why):
        run(write(changes), "--check")


@pytest.mark.parametrize(
    ("text", "why"),
    [("a: [", "is not YAML"), ("- a", "must hold a mapping"), ("", "must hold a mapping"), ("\x00", "is not YAML")],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, text, why) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"broken.yaml.*{why}"):
        find(str(file))
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml"):
        find(str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("nonesuch",), "there is no recipe 'nonesuch'; there are: demo-cpu"),
        (("demo-cpu", "--profile", "v9"), "has no profile 'v9'; it has v0.30.0"),
        (("--run",), "--run needs a name"),
        (("demo-cpu", "--run", "--check"), "exclude each other"),
        (("demo-cpu", "--port", "8001"), "arguments of the server need --run"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, why) -> None:
    with pytest.raises(ConfigError) as error:
        run(*arguments)
    assert why in str(error.value)


def test_a_gaudi_recipe_does_not_run_where_there_is_no_gaudi() -> None:
    with pytest.raises(
        ConfigError, match=r"is for Gaudi 2 \(8 of them\) with vllm-gaudi v0\.30\.0; here are .*no vllm"
    ):
        run("qwen3.5-397b-a17b-fp8-gaudi2", "--run", "--profile", "v0.30.0")


@pytest.mark.parametrize(
    ("version", "gaudi", "name", "why"),
    [
        ("0.29.1", False, "demo-cpu", r"is for vLLM 0\.30\.0; here are vLLM 0\.29\.1"),
        (None, False, "demo-cpu", "here are no vLLM"),
        ("0.30.0", True, "demo-cpu", "is for a CPU"),
        ("0.26.0", True, "qwen3.8-27b-gaudi2", r"profile v0\.30\.0, is for vLLM 0\.30\.0; here are vLLM 0\.26\.0"),
    ],
)
def test_a_recipe_runs_with_its_own_release_only(monkeypatch, version, gaudi, name, why) -> None:
    monkeypatch.setattr(launch, "installed_vllm", lambda: version)
    monkeypatch.setattr(launch, "on_gaudi", lambda: gaudi)
    with pytest.raises(ConfigError, match=why):
        run(name, "--run", "--profile", "v0.30.0")


def test_the_profile_is_the_installed_releases(monkeypatch) -> None:
    monkeypatch.setattr(launch, "installed_vllm", lambda: "0.26.0+hpu")
    assert launch.choose(find("qwen3.8-27b-gaudi2"), None)[0] == "v0.26.0"


def test_run_makes_the_model_and_becomes_the_server(monkeypatch, tmp_path) -> None:
    pytest.importorskip("vllm")
    became = {}

    def execve(path: str, argv: list[str], environment: dict[str, str]) -> None:
        became.update(path=path, argv=argv, environment=environment)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    run("demo-cpu", "--run", "--models", str(tmp_path), "--port", "8001")
    assert (tmp_path / "demo-cpu" / "config.json").exists()
    assert became["argv"][1:5] == ["-m", "inpage", "serve", str(tmp_path / "demo-cpu")]
    assert became["argv"][-2:] == ["--port", "8001"]
    assert became["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert became["environment"]["PATH"] == os.environ["PATH"]
