"""`inpage serve` adds what caching needs, changes nothing that was said, and refuses contradictions before starting."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.demo.model import make_model
from inpage.errors import ConfigError
from inpage.serve.arguments import ServerArguments
from inpage.serve.command import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("serve")))


def flags(model: str, layout: str, *arguments: str) -> dict[str, str]:
    """The command's flags; a flag without a value maps to the empty string."""
    command = build(model, list(arguments), layout).command[3:]
    pairs = {}
    for index, word in enumerate(command):
        if word.startswith("--"):
            following = command[index + 1] if index + 1 < len(command) else "--"
            pairs[word] = "" if following.startswith("--") else following
    return pairs


def test_in_page_is_switched_on_with_the_defaults_that_caching_needs(model):
    assert build(model, [], "in-page").environment == {"INPAGE": "1"}
    assert flags(model, "in-page") == {
        "--model": model,
        "--enable-prefix-caching": "",
        "--mamba-cache-mode": "align",
        "--prefix-cache-retention-interval": "None",
        "--mamba-ssm-cache-dtype": "float32",
        "--enable-prompt-tokens-details": "",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "384",
    }


def test_the_budget_is_one_block_and_room_for_the_decodes(model):
    assert flags(model, "in-page", "--max-num-seqs", "200")["--max-num-batched-tokens"] == str(256 + 256)
    assert flags(model, "in-page", "--max-num-batched-tokens", "999")["--max-num-batched-tokens"] == "999"


def test_what_the_user_says_stays_as_it_is(model):
    said = ["--max_num_seqs=3", "--prefix-cache-retention-interval", "0", "--mamba-ssm-cache-dtype=bfloat16"]
    command = build(model, said, "in-page").command
    assert [word for word in said if word in command] == said
    assert not {"--max-num-seqs", "--mamba-ssm-cache-dtype"} & set(command)


def test_native_and_off_leave_in_page_off(model):
    assert build(model, [], "native").environment == {"INPAGE": "0"}
    off = flags(model, "off")
    assert "--no-enable-prefix-caching" in off
    assert "--enable-prefix-caching" not in off
    assert "--max-num-batched-tokens" not in off


def test_on_gaudi_the_switch_is_vllm_gaudis_own(model, monkeypatch):
    monkeypatch.setattr("inpage.serve.command.on_gaudi", lambda: True)
    assert build(model, [], "in-page").environment == {"VLLM_COMPACT_GDN": "1"}
    assert build(model, [], "native").environment == {"INPAGE": "0"}


def test_per_block_cuts_the_pool_to_what_state_tensors_would_leave(model):
    # A page of 256 tokens of 128 bytes is 32,768 bytes, a state 17,536: of 470 blocks 470 * 32768 // 50304 are left.
    assert flags(model, "per-block", "--num-gpu-blocks-override", "470")["--num-gpu-blocks-override"] == "306"
    memory = str(470 * 32768)
    assert flags(model, "per-block", "--kv-cache-memory-bytes", memory)["--kv-cache-memory-bytes"] == str(
        470 * 32768 * 32768 // 50304
    )


@pytest.mark.parametrize(
    ("layout", "arguments", "message"),
    [
        ("paged", [], "--layout paged is not one of off, native, per-block, in-page"),
        ("off", ["--enable-prefix-caching"], "--layout off and --enable-prefix-caching contradict each other"),
        ("in-page", ["--no-enable-prefix-caching"], "--layout in-page needs prefix caching"),
        ("per-block", [], "it needs its size: add --num-gpu-blocks-override or --kv-cache-memory-bytes"),
        ("in-page", ["--max-num-seqs", "many"], "--max-num-seqs many is not a positive whole number"),
        ("in-page", ["--max-num-seqs"], "--max-num-seqs needs a value"),
    ],
)
def test_a_contradiction_is_refused_before_anything_starts(model, layout, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(model, arguments, layout)


def test_a_model_that_is_no_hybrid_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="is not a Gated DeltaNet hybrid"):
        build(str(tmp_path), [], "in-page")


def test_a_model_that_vllm_has_to_fetch_gets_no_budget_of_ours(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = build("nobody/has-this-model", [], "in-page").command
    assert "--max-num-batched-tokens" not in command
    with pytest.raises(ConfigError, match=r"computes the pool from config\.json, and nobody/has-this-model has none"):
        build("nobody/has-this-model", ["--num-gpu-blocks-override", "9"], "per-block")


def test_a_dry_run_prints_a_command_that_can_be_copied(model):
    result = CliRunner().invoke(app, ["serve", model, "--dry-run", "--port", "9000"])
    assert result.exit_code == 0
    assert "INPAGE=1 " in result.output
    assert f"-m vllm.entrypoints.openai.api_server --model {model} --port 9000" in result.output


def test_flags_are_found_in_every_way_of_writing_them():
    arguments = ServerArguments(["--a-b", "1", "--c_d=2", "--e"])
    assert [arguments.number("--a-b"), arguments.number("--c-d"), arguments.has("--e"), arguments.has("--f")] == [
        1,
        2,
        True,
        False,
    ]
    assert arguments.value("--f") is None


@pytest.mark.parametrize(
    ("retention", "interval", "environment"),
    [
        (None, "None", {"INPAGE": "1"}),
        ("value", "None", {"INPAGE": "1", "INPAGE_RETENTION": "value"}),
        ("dense", "None", {"INPAGE": "1", "INPAGE_RETENTION": "dense"}),
        ("sparse", "0", {"INPAGE": "1"}),
    ],
)
def test_a_retention_is_vllms_interval_and_the_order_of_in_page(model, retention, interval, environment):
    launch = build(model, [], "in-page", retention=retention)
    command = list(launch.command)
    assert command[command.index("--prefix-cache-retention-interval") + 1] == interval
    assert launch.environment == environment


def test_vllms_own_retention_flag_wins_and_is_said_to(model):
    launch = build(model, ["--prefix-cache-retention-interval", "0"], "in-page", retention="value")
    assert launch.command.count("--prefix-cache-retention-interval") == 1
    assert "--prefix-cache-retention-interval 0 was given and wins over --retention." in launch.notes


def test_a_retention_that_does_not_exist_is_refused(model):
    with pytest.raises(ConfigError, match="--retention newest is not one of value, dense, sparse"):
        build(model, [], "in-page", retention="newest")
