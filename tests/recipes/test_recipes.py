"""The recipes that come with the package: figures against the layout code, flags against vLLM's own parser."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.demo.model import DemoModel, make_model
from inpage.gates.run import GATES
from inpage.layout.advice import start_warning
from inpage.layout.model import ModelShape
from inpage.recipes.figures import differences, expected, model_config, planned
from inpage.recipes.launch import command, environment
from inpage.recipes.library import LIBRARY, find, names
from inpage.serve.command import build

REPOSITORY = Path(__file__).parents[2]
RECIPES = [find(name) for name in names()]
GAUDI = [recipe for recipe in RECIPES if recipe.device == "gaudi2"]
CPU = [recipe for recipe in RECIPES if recipe.device == "cpu"]


def by_name(recipe) -> str:
    return recipe.name


def test_every_model_of_the_published_runs_has_a_recipe_for_both_releases_on_gaudi() -> None:
    models = {
        "Qwen/Qwen3.8-27B",
        "Qwen/Qwen3.5-27B-FP8",
        "Qwen/Qwen3.6-27B-FP8",
        "Qwen/Qwen3.6-35B-A3B-FP8",
        "Qwen/Qwen3.5-397B-A17B-FP8",
        "Qwen/Qwen3-Coder-Next",
    }
    assert {recipe.model for recipe in GAUDI} == models
    assert all(list(recipe.profiles) == ["v0.26.0", "v0.30.0"] for recipe in GAUDI)
    assert len(CPU) >= 2


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_the_expected_figures_are_the_plans(recipe) -> None:
    assert differences(recipe) == []


@pytest.mark.parametrize(
    ("name", "block", "state", "blocks", "tokens"),
    [
        # Published: 288,446 and 623,359 tokens, blocks of 896, a state of 3.06 MiB; a MoE with blocks of 1,152.
        ("qwen3.8-27b-gaudi2", 896, 3_207_168, 329, 288_446),
        ("qwen3.5-27b-fp8-gaudi2", 896, 3_207_168, 711, 623_359),
        ("qwen3.6-35b-a3b-fp8-gaudi2", 1152, 32 * 128 * 128 * 4 + 3 * 8192 * 2, None, None),
        # Eight ranks: 8 of 64 value heads, 2 of 16 key heads, one KV head, which is on four ranks.
        ("qwen3.5-397b-a17b-fp8-gaudi2", 640, 8 * 128 * 128 * 4 + 3 * 1536 * 2, None, None),
        ("qwen3-coder-next-gaudi2", 640, 8 * 128 * 128 * 4 + 3 * 2048 * 2, None, None),
    ],
)
def test_the_figures_agree_with_what_was_published_and_with_sums_by_hand(name, block, state, blocks, tokens) -> None:
    stated = find(name).expected
    assert (stated.block_tokens, stated.state_bytes) == (block, state)
    assert blocks in (None, stated.num_blocks)
    assert tokens in (None, stated.printed_tokens)


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_the_flags_make_sense_together(recipe) -> None:
    geometry, plan = planned(recipe)
    assert start_warning(plan, geometry, recipe.value("--max-model-len")) is None
    budget, decodes = recipe.value("--max-num-batched-tokens"), recipe.value("--max-num-seqs") - 1
    # A chunk of exactly one block beside all other decodes, never two: a checkpoint at every boundary.
    assert geometry.block_tokens + decodes <= budget < 2 * geometry.block_tokens
    assert recipe.cards == (recipe.value("--tensor-parallel-size") or 1)


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_vllms_server_knows_every_flag_and_takes_every_value(recipe) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name, profile in recipe.profiles.items():
        if recipe.device == "gaudi2" and name != "v0.30.0":
            continue  # the installed vLLM is 0.30.0
        words = command(recipe, profile, Path("folder"))[2:]
        model, flags = words[0], words[1:]
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *flags])
        assert parsed.max_model_len == recipe.value("--max-model-len")
        assert parsed.prefix_cache_retention_interval is None


@pytest.mark.parametrize("recipe", CPU, ids=by_name)
def test_the_config_of_a_made_model_is_the_one_the_figures_come_from(recipe, tmp_path) -> None:
    folder = make_model(tmp_path / "model", DemoModel(**recipe.made))
    written, assumed = ModelShape.from_file(folder), ModelShape.from_config(model_config(recipe))
    assert written == assumed


@pytest.mark.parametrize("recipe", CPU, ids=by_name)
def test_a_recipe_that_sets_the_threads_leaves_the_worker_unbound_or_they_would_not_count(recipe) -> None:
    for profile in recipe.profiles.values():
        variables = environment(profile)
        if "OMP_NUM_THREADS" in variables:
            assert variables.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"


@pytest.mark.parametrize("recipe", CPU, ids=by_name)
def test_inpage_serve_turns_in_page_on_for_a_cpu_recipe(recipe, tmp_path) -> None:
    folder = make_model(tmp_path / "model", DemoModel(**recipe.made))
    profile = recipe.profiles["v0.30.0"]
    words = command(recipe, profile, folder)
    assert words[:3] == ["inpage", "serve", str(folder)]
    launch = build(words[2], words[3:], "in-page")
    assert launch.environment == {"INPAGE": "1"}
    assert "--enable-prefix-caching" in launch.command


@pytest.mark.parametrize("recipe", GAUDI, ids=by_name)
def test_a_gaudi_recipe_asks_for_in_page_and_claims_no_measurement(recipe) -> None:
    for name, profile in recipe.profiles.items():
        assert environment(profile)["VLLM_COMPACT_GDN"] == "1"
        assert "--enable-prefix-caching" in command(recipe, profile, Path())
        assert profile.vllm == name.removeprefix("v")
        assert profile.measured == []
        # The branch of 0.30.0 has no recorded sources, and that release's default is not dense.
        assert ("INPAGE_ACCEPT_UNVERIFIED" in environment(profile)) == (name == "v0.30.0")
        assert any(f"--profile {name} gdn-prefix-cache" in step.run for step in profile.install)


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_the_gates_are_commands_that_inpage_gate_takes(recipe) -> None:
    usage = CliRunner().invoke(app, ["gate", "--help"], env={"COLUMNS": "200"}).output
    for step in recipe.gates:
        program, subcommand, url, *options = shlex.split(step.run)
        assert (program, subcommand, url) == ("inpage", "gate", "http://127.0.0.1:8000")
        for option, value in zip(options[::2], options[1::2], strict=True):
            assert option in usage
            assert option != "--only" or set(value.split(",")) <= set(GATES)


def test_the_check_names_the_figure_that_differs(tmp_path) -> None:
    text = (LIBRARY / "qwen3.8-27b-gaudi2.yaml").read_text()
    file = tmp_path / "qwen3.8-27b-gaudi2.yaml"
    file.write_text(text.replace("num_blocks: 329", "num_blocks: 330"))
    result = CliRunner().invoke(app, ["recipe", str(file), "--check"])
    assert result.exit_code == 1
    assert "num_blocks: the file says 330, the plan 329" in result.output
    assert "num_blocks: 329" in result.output
    assert CliRunner().invoke(app, ["recipe", "--check"]).exit_code == 0


def test_more_memory_or_more_context_changes_what_is_expected() -> None:
    recipe = find("qwen3.8-27b-gaudi2")
    pool = recipe.pool.model_copy(update={"memory": "20GiB"})
    assert expected(recipe.model_copy(update={"pool": pool})).num_blocks == (20 << 30) // (56 << 20)


def test_a_clone_has_the_recipes_at_the_top() -> None:
    assert (REPOSITORY / "recipes").resolve() == LIBRARY.resolve()
    assert {path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")} == set(names())


def test_a_wheel_has_the_recipes_and_finds_them(tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build_wheel, "--wheel-dir", str(tmp_path), str(source)], check=True)
    wheel = next(tmp_path.glob("inpage-*.whl"))
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    listed = subprocess.run(
        [sys.executable, "-c", "from inpage.recipes.library import LIBRARY, names; print(LIBRARY, *names())"],
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert Path(listed[0]) == installed / "inpage" / "recipes" / "library"
    assert listed[1:] == names()


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_nothing_in_a_recipe_is_left_open(recipe) -> None:
    text = (LIBRARY / f"{recipe.name}.yaml").read_text()
    assert re.search(r"TODO|FIXME|\?\?", text) is None
    assert recipe.device == "cpu" or recipe.geometry.source
