"""The doctor on a command that would be served, on a server (a double), and without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.demo.model import DemoModel, make_model
from inpage.doctor import environment, launch, running
from inpage.doctor.finding import Finding, Level
from inpage.errors import ConfigError
from inpage.gates.client import Completions
from inpage.gates.metrics_text import Metrics
from inpage.gates.server import About, Server
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.serve.arguments import ServerArguments
from inpage.serve.command import build

CONFIG = {
    "block_size": "128",
    "enable_prefix_caching": "True",
    "mamba_cache_mode": "align",
    "prefix_cache_retention_interval": "None",
    "kv_cache_size_tokens": "38102",
}
FLOAT32 = ("--mamba-ssm-cache-dtype", "float32")
METRICS = "vllm:prefix_cache_queries_total 20000\nvllm:prefix_cache_hits_total 12000\ninpage_saves_total 3\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), DemoModel())


def judged(model: Path, *flags: str) -> dict[str, Finding]:
    return {one.topic: one for one in launch.examine(str(model), ServerArguments(flags), None, "cpu")}


def test_what_inpage_serve_starts_is_found_right(model):
    added = build(str(model), ["--max-model-len", "4096", "--num-gpu-blocks-override", "60"], "in-page")
    flags = added.command[added.command.index(str(model)) + 1 :]
    found = judged(model, *flags)
    assert {one.level for one in found.values()} <= {Level.OK, Level.INFO}
    assert "256 tokens. The shortest prompt that can hit has 257" in found["block"].text
    assert found["pool"].text.startswith("60 blocks, 11,170 tokens at max-model-len 4,096")


@pytest.mark.parametrize(
    ("flags", "topic", "level", "change"),
    [
        ((), "coverage", Level.WRONG, "add --enable-prefix-caching"),
        (("--enable-prefix-caching", "--prefix-match-unit", "32"), "coverage", Level.WRONG, "change the flag"),
        (("--max-num-batched-tokens", "200"), "token budget", Level.WRONG, "--max-num-batched-tokens 384"),
        (("--max-num-batched-tokens=256",), "token budget", Level.WRONG, "--max-num-batched-tokens 384"),
        (("--max-num-batched-tokens", "2048"), "token budget", Level.ADVICE, "--max-num-batched-tokens 384"),
        ((), "token budget", Level.ADVICE, "--max-num-batched-tokens 384"),
        ((), "retention", Level.ADVICE, "--prefix-cache-retention-interval None"),
        ((), "state dtype", Level.ADVICE, "--mamba-ssm-cache-dtype float32"),
        (("--num-gpu-blocks-override", "20", "--max-model-len", "8192"), "pool", Level.WRONG, "--max-model-len 3328"),
    ],
)
def test_flags_that_do_not_fit_come_with_the_flag_to_change(model, flags, topic, level, change):
    found = judged(model, *flags, *(() if topic == "state dtype" else FLOAT32))[topic]
    assert found.level == level
    assert change in str(found.change)


def test_the_pool_is_not_judged_without_its_size(model):
    assert judged(model)["pool"].text == "not judged without the pool's memory (--memory) and --max-model-len"


def test_a_model_that_is_no_hybrid_is_wrong(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    found = judged(tmp_path)["model"]
    assert found.level == Level.WRONG
    assert "not a Gated DeltaNet hybrid" in found.text


class Said(Server):
    """A server of which only the metrics are known."""

    def __init__(self, config: dict[str, str], text: str, unit: int | None = None) -> None:
        about = About("http://127.0.0.1:9", "m", "0.30.0", 20480, 160, config, unit)
        super().__init__(Completions("http://127.0.0.1:9", "m", 1), about)
        self.text = text

    def metrics(self) -> Metrics:
        return Metrics(self.text)


def said(
    config: dict[str, str], text: str = METRICS, geometry: Geometry | None = None, unit: int | None = None
) -> dict[str, Finding]:
    return {one.topic: one for one in running.examine(Said(config, text, unit), geometry)}


def test_a_running_in_page_server_has_nothing_wrong():
    found = said(CONFIG)
    assert {one.level for one in found.values()} <= {Level.OK, Level.INFO}
    assert found["in-page"].level == Level.OK
    assert found["hits"].text == "60.0% of 20,000 prompt tokens came from the cache"
    assert found["pool"].text == "160 blocks, 38,102 tokens"


def test_a_running_server_is_told_what_to_change(model):
    geometry = Geometry.of(ModelShape.from_file(model, ssm_dtype="float32"))
    assert said({**CONFIG, "enable_prefix_caching": "False"})["prefix caching"].level == Level.WRONG
    assert "runs another layout" in said(CONFIG, "")["in-page"].text
    assert said({**CONFIG, "prefix_cache_retention_interval": "0"})["retention"].level == Level.ADVICE
    assert "the pool of this model has 256" in said(CONFIG, METRICS, geometry)["block"].text
    few = METRICS.replace("12000", "10") + "vllm:num_preemptions_total 4\n"
    assert said(CONFIG, few)["hits"].level == Level.ADVICE
    assert said(CONFIG, few)["preemptions"].text.startswith("4 so far")
    assert said({})["metrics"].level == Level.WRONG


def counted(
    tokens: int = 30_000,
    hits: int = 0,
    cold: int = 20,
    restores: int = 0,
    short: int = 0,
    evicted: tuple[int, int] = (0, 0),
    attention_only: int = 0,
    preempted: int = 0,
) -> str:
    """A server's counters, as far as they tell why it does not hit."""
    return (
        f"vllm:prefix_cache_queries_total {tokens}\nvllm:prefix_cache_hits_total {hits}\n"
        f"inpage_fresh_slots_total {cold}\ninpage_restores_total {restores}\ninpage_short_prompts_total {short}\n"
        f'inpage_evicted_checkpoint_blocks_total{{when="before_hit"}} {evicted[0]}\n'
        f'inpage_evicted_checkpoint_blocks_total{{when="after_hit"}} {evicted[1]}\n'
        f"inpage_attention_only_tokens_total {attention_only}\nvllm:num_preemptions_total {preempted}\n"
    )


REASONS = {"short prompts", "evictions", "no checkpoint", "shared prefix"}
SPARSE = {**CONFIG, "prefix_cache_retention_interval": "0"}


@pytest.mark.parametrize(
    ("config", "text", "topic", "says", "change"),
    [
        (
            CONFIG,
            counted(tokens=1_440, cold=3, short=3),
            "short prompts",
            "3 of 3 requests had a prompt of one block (or one --prefix-match-unit) at most, which can never hit",
            "--prefix-match-unit 64",
        ),
        (
            CONFIG,
            counted(short=0),
            "shared prefix",
            "20 requests with prompts long enough to hit found nothing, and nothing was evicted",
            "put what is shared first",
        ),
        (
            CONFIG,
            counted(evicted=(1_200, 30), hits=100, restores=1),
            "evictions",
            "1,200 blocks of checkpoints were evicted before a prompt came back to them, 30 after one had",
            "give the pool more memory",
        ),
        (
            SPARSE,
            counted(attention_only=21_504),
            "no checkpoint",
            "21,504 of 30,000 prompt tokens had their attention blocks in the cache, but no checkpoint at their end, "
            "and were computed again: retention is sparse (0)",
            "--prefix-cache-retention-interval None",
        ),
        (
            CONFIG,
            counted(attention_only=21_504),
            "no checkpoint",
            "a token budget of several blocks leaves a checkpoint only at the end of a chunk",
            "--max-num-batched-tokens below two blocks",
        ),
    ],
)
def test_no_hits_are_explained_with_the_reason_the_numbers_and_what_to_do(config, text, topic, says, change):
    found = said(config, text)
    assert REASONS & set(found) == {topic}
    assert (found["hits"].level, found["hits"].change) == (Level.ADVICE, f"see below: {topic}")
    assert found[topic].level == Level.ADVICE
    assert says in found[topic].text
    assert change in str(found[topic].change)


def test_every_reason_that_counts_is_a_finding_of_its_own_and_the_first_comes_first():
    text = counted(cold=60, short=40, evicted=(90, 0), attention_only=6_000, preempted=10)
    config = {name: value for name, value in CONFIG.items() if name != "prefix_cache_retention_interval"}
    found = said(config, text, unit=64)
    assert [topic for topic in found if topic in REASONS] == ["short prompts", "evictions", "no checkpoint"]
    assert "40 of 50 requests had a prompt of 64 tokens at most" in found["short prompts"].text
    assert "or checkpoints were evicted (90 blocks)" in found["no checkpoint"].text


@pytest.mark.parametrize(
    ("text", "topics"),
    [
        (counted(hits=12_000, restores=15, cold=5, short=2, evicted=(50, 50), attention_only=9_000), set()),
        (counted(tokens=3_000, cold=1), set()),  # the first request has nothing to hit
        (counted(tokens=3_000, hits=100, cold=3, restores=1), set()),  # too little to judge
        (counted(tokens=3_000, cold=2, short=1), {"short prompts"}),  # the other may be the first of its kind
        (counted(attention_only=200, cold=30, short=1), {"shared prefix"}),  # the others account for little
        (counted(evicted=(0, 60), hits=100, restores=1), set()),  # evicted after a hit: as a cache should
    ],
)
def test_what_is_no_reason_is_not_named(text, topics):
    assert REASONS & set(said(CONFIG, text)) == topics


def test_without_a_reason_that_the_counters_show_the_usual_ones_are_named():
    older = METRICS.replace("12000", "10")
    for text in (older, counted(evicted=(0, 60))):
        assert "compare prompt lengths with the block" in str(said(CONFIG, text)["hits"].change)


@pytest.mark.parametrize(
    ("unit", "known", "shortest"),
    [
        (None, True, "the shortest prompt that can hit has 257"),
        (64, True, "the shortest prompt that can hit has 65 (--prefix-match-unit 64)"),
        (None, False, "a prompt must be longer than a block to hit"),
        (64, False, "the shortest prompt that can hit has 65 (--prefix-match-unit 64)"),
    ],
)
def test_the_shortest_prompt_that_can_hit_goes_by_the_match_unit_where_there_is_one(model, unit, known, shortest):
    geometry = Geometry.of(ModelShape.from_file(model, ssm_dtype="float32")) if known else None
    assert said({**CONFIG, "block_size": "256"}, geometry=geometry, unit=unit)["block"].text.endswith(shortest)


def test_the_command_exits_with_one_when_something_is_wrong(model, monkeypatch, tmp_path):
    for name in environment.MEANINGS:
        monkeypatch.delenv(name, raising=False)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    out = tmp_path / "d.json"
    run = CliRunner().invoke(app, ["doctor", str(model), "--json", str(out), "--max-num-seqs", "4"])
    assert run.exit_code == 1
    assert "change: add --enable-prefix-caching" in run.output
    assert [one["topic"] for one in json.loads(out.read_text()) if one["level"] == "wrong"] == ["coverage"]


def test_flags_without_a_model_and_a_server_that_is_not_there_are_refused():
    assert isinstance(CliRunner().invoke(app, ["doctor", "--max-num-seqs", "4"]).exception, ConfigError)
    run = CliRunner().invoke(app, ["doctor", "--url", "http://127.0.0.1:9"])
    assert "does not list its models" in str(run.exception)


def test_without_vllm_the_doctor_still_runs_and_says_so(tmp_path):
    """A Python that finds no vllm: the real command in a process of its own."""
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name.split('.')[0] == 'vllm' else real(name, *rest)\n"
        "sys.modules['vllm'] = None\n"
        "sys.argv = ['inpage', 'doctor']\n"
        "from inpage.cli import main\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1, run.stderr
    assert "no package vllm is installed for this Python" in " ".join(run.stdout.split())
