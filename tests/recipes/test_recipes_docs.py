"""docs/recipes.md and docs/routing.md say what is so: their commands run, their table is the recipes'."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.recipes.library import LIBRARY, find, names
from inpage.routing.haproxy import INSTALL, find_haproxy

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str, subcommand: str) -> list[str]:
    lines = (DOCS / page).read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines if line.startswith(f"inpage {subcommand}")]


def run(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, f"{command}: {result.output} {result.exception}"


@pytest.mark.parametrize("command", commands("recipes.md", "recipe"))
def test_the_commands_of_recipes_md_run(command, monkeypatch, tmp_path) -> None:
    def execve(*_: object) -> None:
        raise SystemExit(0)

    if "--run" in command:
        pytest.importorskip("vllm")
        monkeypatch.setattr(os, "execve", execve)
    monkeypatch.chdir(tmp_path)
    text = (LIBRARY / "demo-cpu.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: demo-cpu", "name: mine", 1))
    run(command)


@pytest.mark.parametrize("command", commands("routing.md", "route-config"))
def test_the_commands_of_routing_md_run(command, monkeypatch, tmp_path) -> None:
    if find_haproxy() is None:
        pytest.skip(INSTALL)
    monkeypatch.chdir(tmp_path)
    run(command)
    assert (tmp_path / "haproxy.cfg").read_text().startswith("# Written by `inpage route-config`: 2 replicas")


def test_the_options_in_routing_md_are_the_commands_with_its_defaults() -> None:
    usage = CliRunner().invoke(app, ["route-config", "--help"], env={"COLUMNS": "300"}).output
    options = re.findall(r"^[^a-z-]*(--[a-z-]+)", usage, re.MULTILINE)
    told = re.findall(r"^\| `(--[a-z-]+)` \|([^|]*)\|", (DOCS / "routing.md").read_text(), re.MULTILINE)
    assert {option for option, _ in told} == set(options) - {"--help", "--out"}
    for option, default in told:
        line = next(line for line in usage.splitlines() if re.search(rf"{option}\b", line))
        assert "[default:" not in line or f"[default: {default.strip()}]" in line


def test_the_table_of_recipes_md_is_the_recipes() -> None:
    rows = re.findall(
        r"^\| ([a-z0-9.-]+) \| ([^|]+) \| ([0-9,]+) \| ([0-9,]+) tokens \| (\w+)",
        (DOCS / "recipes.md").read_text(),
        re.MULTILINE,
    )
    assert {row[0] for row in rows} == set(names())
    for name, cards, block, tokens, basis in rows:
        recipe = find(name)
        assert cards.strip() == (str(recipe.cards) if recipe.device == "gaudi2" else "–")
        assert block == f"{recipe.expected.block_tokens:,}"
        assert tokens == f"{recipe.expected.printed_tokens:,}"
        assert basis == recipe.pool.basis


def test_haproxy_is_not_needed_to_write_a_configuration(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    run(f"inpage route-config http://10.0.0.1:8000 --out {tmp_path / 'haproxy.cfg'}")
    result = CliRunner().invoke(app, ["route-config", "http://10.0.0.1:8000", "--check"])
    assert INSTALL in str(result.exception)
