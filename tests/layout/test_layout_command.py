"""`inpage plan` from the outside."""

import json

import pytest
import typer
from typer.testing import CliRunner

from inpage.errors import ConfigError
from inpage.layout.command import plan

app = typer.Typer()
app.command()(plan)


@pytest.fixture
def run(tmp_path, config_27b):
    (tmp_path / "config.json").write_text(json.dumps(config_27b))

    def run(*options: str, memory: str = "18475MiB", length: str = "262144", path=tmp_path) -> str:
        arguments = [str(path), "--memory", memory, "--max-model-len", length, *options]
        result = CliRunner().invoke(app, arguments)
        if result.exception:
            raise result.exception
        return result.output

    return run


def row(output: str, label: str) -> list[str]:
    lines = [line.strip() for line in output.splitlines()]
    return next(line for line in lines if line.startswith(label)).removeprefix(label).split("  ")


def cells(output: str, label: str) -> list[str]:
    return [cell.strip() for cell in row(output, label) if cell.strip()]


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("warning:")]


def test_the_table_has_the_specs_numbers(run) -> None:
    output = run()
    assert cells(output, "on one rank") == ["off", "per-block", "in-page"]
    assert cells(output, "block tokens") == ["896"] * 3
    assert cells(output, "shortest hit") == ["none", "896", "896"]
    assert cells(output, "attention page") == ["3,670,016 B"] * 3
    assert cells(output, "GDN state") == ["3,207,168 B"] * 3
    assert cells(output, "padding") == ["462,848 B", "none", "462,848 B"]
    assert cells(output, "block, all layers") == ["58,720,256 B", "110,034,944 B", "58,720,256 B"]
    assert cells(output, "blocks") == ["329", "176", "329"]
    assert cells(output, "printed tokens") == ["291,369", "cannot start", "288,446"]
    assert cells(output, "sessions kept") == ["0", "2", "4"]
    assert cells(output, "slots") == ["14", "0", "14"]
    assert cells(output, "slot memory") == ["718,405,632 B", "none", "718,405,632 B"]
    assert "685.12 MiB" in output
    assert "16 attention layers, 48 GDN layers in 3 groups" in output


def test_the_text_says_what_the_memory_includes_and_when_a_session_is_kept(run) -> None:
    output = " ".join(run().split())
    assert "Memory: 18,475.00 MiB (19,372,441,600 B) is the pool of one rank;" in output
    assert "weights, activations and the slots come on top." in output
    assert "Sessions kept: of 65,536 tokens, by their attention blocks and two blocks in every GDN" in output


def test_a_layout_that_cannot_start_is_told_how_long_it_could_be(run) -> None:
    assert warnings(run()) == [
        "warning: per-block cannot start at this max-model-len (262,144): needs 299 blocks, has 176, one of "
        "them the null block; the largest that fits is 151,424, where vLLM prints 152,289 tokens."
    ]
    output = run(length="131072")
    assert cells(output, "printed tokens")[1] == "150,775"
    assert warnings(output) == []


def test_a_pool_too_small_for_any_length_is_told_so(run) -> None:
    assert warnings(run(memory="60MiB"))[2] == (
        "warning: in-page cannot start at this max-model-len (262,144): needs 299 blocks, has 1, one of "
        "them the null block; no length fits, give it more memory."
    )


def test_the_fp8_model_keeps_eight_sessions_in_page_and_four_per_block(run) -> None:
    output = run(memory="39840MiB")
    assert cells(output, "blocks") == ["711", "379", "711"]
    assert cells(output, "printed tokens")[1:] == ["332,282", "623,359"]
    assert cells(output, "sessions kept") == ["0", "4", "8"]


def test_the_cpu_engine_has_native_too_and_its_own_slots(run) -> None:
    output = run("--engine", "cpu", "--max-num-seqs", "8")
    assert cells(output, "on one rank") == ["off", "native", "per-block", "in-page"]
    assert cells(output, "printed tokens") == ["291,369", "288,446", "cannot start", "288,446"]
    assert cells(output, "slots") == ["0", "0", "0", "9"]
    assert all(len(line) <= 80 for line in output.splitlines() if not line.startswith("warning:"))


def test_prompts_shorter_than_a_block_are_warned_of(run) -> None:
    assert warnings(run("--typical-prompt", "427", length="131072")) == [
        "warning: Prompts of 427 tokens are shorter than a block of 896: they never hit."
    ]
    assert warnings(run("--typical-prompt", "896", length="131072")) == []


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            1024,
            "The token budget of 1,024 is not a multiple of the block of 896: a prefill chunk uses 896 of it, "
            "the other 128 serve decodes and last chunks only.",
        ),
        (
            896,
            "The token budget of 896 has no room for a block of 896 beside 3 decodes: prefill waits until "
            "they end; give it 899 or more.",
        ),
        (
            512,
            "The token budget of 512 is below a block of 896: vLLM 0.26.0 schedules no prefill at all, "
            "0.30.0 takes several steps to each checkpoint.",
        ),
        (899, None),
        (1792, None),
    ],
)
def test_a_token_budget_that_blocks_do_not_fill_is_warned_of(run, budget: int, message: str | None) -> None:
    output = run("--max-num-batched-tokens", str(budget), length="131072")
    assert warnings(output) == ([f"warning: {message}"] if message else [])


def test_a_16_bit_state_that_nobody_asked_for_is_pointed_out(run, tmp_path, config_next) -> None:
    (tmp_path / "next.json").write_text(json.dumps(config_next))
    options = {"path": tmp_path / "next.json", "length": "32768"}
    assert warnings(run(**options)) == [
        "warning: The ssm state is taken as bfloat16, vLLM's default for qwen3_next; with "
        "--mamba-ssm-cache-dtype float32, or on a CPU with AVX512-BF16, plan with --ssm-dtype float32."
    ]
    stated = run("--ssm-dtype", "float32", **options)
    assert warnings(stated) == []
    assert cells(stated, "block tokens") == ["1,152"] * 3


def test_the_match_unit_says_what_can_hit_and_has_to_divide_the_block(run) -> None:
    output = run("--prefix-match-unit", "128", "--typical-prompt", "200", length="65536")
    assert cells(output, "shortest hit") == ["none", "128", "128"]
    assert warnings(output) == []
    short = run("--prefix-match-unit", "128", "--typical-prompt", "100", length="65536")
    assert warnings(short) == ["warning: Prompts of 100 tokens are shorter than a mark of 128: they never hit."]
    with pytest.raises(ConfigError, match="marks every 100 tokens do not divide blocks of 896 tokens"):
        run("--prefix-match-unit", "100")


def test_kv_dtype_tp_and_alignment_reach_the_geometry(run) -> None:
    assert cells(run("--kv-dtype", "fp8"), "block tokens") == ["1,664"] * 3
    assert cells(run("--alignment", "16"), "block tokens") == ["784"] * 3
    assert cells(run("--tp", "4"), "GDN state") == ["801,792 B"] * 3


def test_session_tokens_default_to_max_model_len_when_that_is_less(run) -> None:
    assert "of 32,768 tokens" in run(length="32768")
    # 329 blocks less the null block, by 23 + 2 * 3 for 20,000 tokens.
    assert cells(run("--session-tokens", "20000"), "sessions kept")[2] == "11"


def test_json_has_the_numbers_and_the_warnings(run, tmp_path) -> None:
    output = run("--json", str(tmp_path / "plan.json"))
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert numbers["memory_bytes"] == 18475 << 20
    assert numbers["geometry"]["state_bytes"] == 3_207_168
    assert numbers["geometry"]["page_bytes"] - numbers["geometry"]["padding_bytes"] == 3_207_168
    assert numbers["layouts"]["in-page"]["printed_tokens"] == 288_446
    assert numbers["layouts"]["per-block"]["printed_tokens"] is None
    assert numbers["layouts"]["per-block"]["largest_max_model_len"] == 151_424
    assert [f"warning: {text}" for text in numbers["warnings"]] == warnings(output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "cuda"), "The engine 'cuda' is not one of gaudi, cpu"),
        (("--session-tokens", "300000"), "A session of 300,000 tokens exceeds max-model-len 262,144"),
        (("--session-tokens", "0"), "Memory, max-model-len, session tokens and max-num-seqs must be at least"),
        (("--max-num-seqs", "0"), "Memory, max-model-len, session tokens and max-num-seqs must be at least"),
        (("--kv-dtype", "int8"), "The KV dtype 'int8' is not one of"),
        (("--ssm-dtype", "int8"), "the ssm dtype 'int8' is not one of float32, bfloat16, float16"),
        (("--tp", "3"), "TP 3 does not divide"),
        (("--alignment", "-128"), "The TP size and the alignment must be at least one"),
        (("--json", "/nowhere/plan.json"), "Cannot write /nowhere/plan.json: No such file or directory"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(run, options, message) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        run(*options)
    assert "\n" not in str(error.value)


def test_bad_memory_and_a_missing_config_are_refused(run, tmp_path) -> None:
    with pytest.raises(ConfigError, match="'much' is not a memory size"):
        run(memory="much")
    with pytest.raises(ConfigError, match="Cannot read Qwen/Qwen3"):
        run(path="Qwen/Qwen3.8-27B")
