"""The Gaudi engine on the real vllm-gaudi v0.26.0 and vLLM 0.26.0; only the device is emulated."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from qwen3_5 import ENGINE_OPTIONS

from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape

CHECKOUT = os.environ.get("VLLM_GAUDI")
if not CHECKOUT:
    pytest.skip(
        "needs the real plugin: make test-gaudi VLLM_GAUDI=<checkout of vllm-gaudi v0.26.0>", allow_module_level=True
    )
pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[2] / "fixes" / "apply_all.py"
BLOCK = 384
BUDGET = 1024
IN_PAGE = {"VLLM_COMPACT_GDN": "1"}
STOCK = {"VLLM_COMPACT_GDN": "1", "INPAGE": "0"}
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def expected_hit(row) -> int:
    """The last boundary of the cold prompt at which a chunk ended: chunks are as many whole blocks as fit."""
    length, block, chunk = row["length"], BLOCK, BUDGET // BLOCK * BLOCK
    ends = sorted({*range(chunk, length, chunk), length // block * block})
    limit = length - 1 if row["kind"] == "same" else length
    return max(end for end in ends if end <= limit)


def assert_exact(rows):
    """12 of 12 hits equal cold to the bit, and start where a checkpoint was written."""
    assert [row["cold"] for row in rows] == [0] * 12
    assert [row["hit"] for row in rows] == [expected_hit(row) for row in rows]
    assert [(row["length"], row["kind"], row["drift"]) for row in rows if not row["equal"]] == []


# ------------------------------------------------------------------ exact hits
def test_hits_equal_cold_in_process(plugin_run):
    assert_exact(plugin_run("parity", **IN_PAGE)["result"]["rows"])


def test_hits_equal_cold_with_engine_core_in_its_own_process(plugin_run):
    run = plugin_run("parity", **IN_PAGE, **OWN_PROCESS)
    assert_exact(run["result"]["rows"])
    assert "the configuration says blocks of 128 tokens, the pool has blocks of 384" in run["log"]


def test_hits_equal_cold_without_async_scheduling(plugin_run):
    assert_exact(plugin_run("parity", {"async_scheduling": False}, **IN_PAGE)["result"]["rows"])


def test_hits_equal_cold_on_two_tensor_parallel_ranks(plugin_run):
    assert_exact(plugin_run("parity", TWO_RANKS, **IN_PAGE, **OWN_PROCESS)["result"]["rows"])


@pytest.mark.parametrize(
    ("options", "process"),
    [(None, {}), (None, OWN_PROCESS), (TWO_RANKS, OWN_PROCESS)],
    ids=["in process", "process of its own", "two ranks"],
)
def test_stock_fails_on_the_same_script(plugin_run, options, process):
    """Nearly every hit is wrong; a hit that does not happen (chunks end off blocks) equals cold, of course."""
    rows = plugin_run("parity", options, **STOCK, **process)["result"]["rows"]
    hits = [row for row in rows if row["hit"]]
    assert len(hits) >= 10
    assert sum(not row["equal"] for row in hits) >= len(hits) - 1
    assert max(row["drift"] or 9.0 for row in hits) > 0.05


MARKS = {"prefix_match_unit": 128, "max_num_batched_tokens": 512, "lengths": (200, 350, 900, 1500, 1300)}


def test_hits_at_marks_inside_blocks_equal_cold_runs_of_the_same_chunks(plugin_run):
    rows = plugin_run("parity", {**MARKS, "same_chunks": True}, **IN_PAGE)["result"]["rows"]
    hits = [(length // 128 * 128, True) for length in MARKS["lengths"] for _ in ("same", "extension")]
    assert [(row["hit"], row["equal"]) for row in rows] == hits


def test_hits_at_marks_inside_blocks_equal_cold_in_a_process_of_its_own(plugin_run):
    """There a test cannot choose the chunks of a cold run; a prompt that is sent again has the same ones anyway."""
    rows = plugin_run("parity", MARKS, **IN_PAGE, **OWN_PROCESS)["result"]["rows"]
    assert [row["hit"] for row in rows] == [length // 128 * 128 for length in MARKS["lengths"] for _ in range(2)]
    assert all(row["equal"] for row in rows if row["kind"] == "same")


def test_hits_equal_cold_on_qwen3_5(plugin_run):
    """Language and vision, dense: the architecture of the 27B models."""
    assert_exact(plugin_run("parity", ENGINE_OPTIONS, **IN_PAGE)["result"]["rows"])


def test_whatever_the_chunks_hits_and_cold_runs_are_equal(plugin_run):
    """Products of the emulated device do not depend on the shape of a chunk, so neither does any answer."""
    rows = plugin_run("chunk_ends", ENGINE_OPTIONS, **IN_PAGE)["result"]
    assert [(row["length"], row["equal"], row["same ends"], row["cold drift"]) for row in rows] == [
        (row["length"], True, True, 0.0) for row in rows
    ]
    assert any(set(row["hit ends"]) - set(row["cold ends"]) for row in rows), "no hit had chunk ends of its own"


def test_where_products_round_by_their_shape_a_hit_equals_the_cold_run_of_its_chunks_and_drifts_no_more(plugin_run):
    """Products as this processor's BLAS computes them; whether anything drifts at all depends on the processor."""
    rows = plugin_run("chunk_ends", ENGINE_OPTIONS, **IN_PAGE, EMULATED_HPU_PRODUCTS="whole")["result"]
    assert [row["length"] for row in rows if not row["same ends"]] == []
    assert [(row["length"], row["drift"]) for row in rows if row["drift"] > row["cold drift"]] == []


def test_stock_fails_on_qwen3_5(plugin_run):
    rows = plugin_run("parity", ENGINE_OPTIONS, **STOCK)["result"]["rows"]
    assert sum(row["equal"] for row in rows if row["hit"]) <= 1


def test_the_start_line_takes_the_place_of_upstreams_warning(plugin_run):
    log = plugin_run("parity", **IN_PAGE)["log"]
    assert "does not support prefix caching" not in log
    assert "inpage: in-page layout, block 384 tokens, cached: checkpoints at every multiple of 384 tokens" in log
    assert "shortest prompt that can hit 385 tokens, 64 blocks" in log
    assert "does not support prefix caching" in plugin_run("parity", **STOCK)["log"]


def test_hits_equal_cold_after_a_warm_up(plugin_run):
    """Warm-up runs on slots and on the null block, and leaves nothing in either that a request could see."""
    options = {"lengths": [900, 1500], "max_num_seqs": 2, "max_model_len": 2048}
    run = plugin_run("parity", options, **IN_PAGE, VLLM_SKIP_WARMUP="false")
    assert [(row["hit"], row["equal"]) for row in run["result"]["rows"]] == [(768, True)] * 2 + [(1152, True)] * 2
    assert "Warmup finished" in run["log"]


def test_hits_equal_cold_before_and_after_sleep(plugin_run):
    result = plugin_run("sleeping", **IN_PAGE)["result"]
    assert result["asleep"]
    assert [(row["hit"], row["equal"]) for row in result["rows"]] == [(1152, True)] * 4
    assert result["afterwards"] == {"hit": 0, "equal": True, "drift": 0.0}


SWITCHING = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def test_stock_cannot_switch_to_a_hybrid_at_all(plugin_run, wide_model):
    """v0.26.0 chooses the block of the new model before its layers are there; the test below mends that."""
    result = plugin_run("switching", {"other": str(wide_model), "mended": False}, **STOCK, **SWITCHING)["result"]
    assert "NotImplementedError: Layer model.layers.3.self_attn.attn: page size is not divisible" in result["error"]


def test_hits_equal_cold_on_each_model_of_a_switch(plugin_run, wide_model):
    result = plugin_run("switching", {"other": str(wide_model), "mended": True}, **IN_PAGE, **SWITCHING)["result"]
    assert result["runners"] == ["InPageModelRunner"] * 2
    assert [(row["hit"], row["equal"]) for row in result["rows"]] == [(768, True)] * 6


# ------------------------------------------------------------------ mutants
@pytest.fixture(scope="module")
def broken(plugin_run):
    return plugin_run("mutants", **IN_PAGE)["result"]


def test_the_unbroken_rules_pass(broken):
    assert broken["unbroken"] == broken["unbroken, pages full of NaN"] == 6


@pytest.mark.parametrize("rule", ["no save", "no restore", "no zeroing"])
def test_without_this_rule_hits_are_wrong(broken, rule):
    assert broken[rule] < 6


def test_without_the_grid_fix_the_engine_stops_rather_than_serve(plugin_run):
    run = plugin_run("parity", {"lengths": [1500]}, **IN_PAGE, **OWN_PROCESS, INPAGE_TEST_BREAK="no grid fix")
    assert "EngineDeadError" in run["result"]["error"]
    assert "passes the boundary 768 without ending on it" in run["log"]


def test_without_hand_back_the_engine_stops_for_want_of_slots(plugin_run):
    result = plugin_run("preemption", **IN_PAGE, INPAGE_TEST_BREAK="no hand-back")["result"]
    assert result["error"].startswith("StateError: ")


# ------------------------------------------------------------------ preemption
def test_priority_preemption_with_two_slots_survives_and_resumes_from_cache(plugin_run):
    result = plugin_run("preemption", **IN_PAGE)["result"]
    assert result["preempted"]
    assert result["finished"] == {"a": 300, "b": 500, "c": 20}
    assert result["held"] == 1  # that of the request which came last; it goes back with the next step
    from_cache = [position for _, position in result["resumed"] if position]
    assert from_cache
    assert all(position % BLOCK == 0 for position in from_cache)
    assert result["restored as saved"] == result["restores"] == len(from_cache)


def test_stock_dies_of_the_same_requests(plugin_run):
    result = plugin_run("preemption", {"enable_prefix_caching": False})["result"]
    assert result["error"] == "IndexError: pop from empty list"


# ------------------------------------------------------------------ decode padding
PAD_ROW = 64 * 128
"""Of kernel block 64, which lies in a live block: where stock's padding goes in a pool of 64 blocks."""


def test_stock_pads_into_a_live_block(plugin_run):
    result = plugin_run("decode_padding")["result"]
    assert (result["runner"], result["pad block"]) == ("HPUModelRunner", 64)
    assert len(result["strays"]) == 4  # K and V of two attention layers
    assert all(rows == [PAD_ROW] for rows in result["strays"].values())
    assert result["live"] == ["attention of a running request"]
    assert result["steps with strays"] == result["steps"] >= 10


@pytest.mark.parametrize(
    ("options", "environment", "runner", "saves"),
    [
        ({}, {"INPAGE_HYBRID_DECODE_PAD": "1"}, "DecodePadModelRunner", 0),
        ({"enable_prefix_caching": True}, IN_PAGE, "InPageModelRunner", 1),
    ],
    ids=["the fix alone", "in-page"],
)
def test_padded_decodes_leave_every_page_as_it_is(plugin_run, options, environment, runner, saves):
    result = plugin_run("decode_padding", options, **environment)["result"]
    assert (result["runner"], result["pad block"]) == (runner, 64 * 3)
    assert result["steps"] >= 10
    assert result["bytes compared"] == 4 * 64 * BLOCK * 32 * 2  # K and V of two layers, a head of 32 in bf16
    assert result["saves"] == saves
    assert bool(result["checkpoints"]) == bool(saves)
    assert [rows for rows in result["strays"].values() if rows] == []


def test_without_the_pad_fix_in_page_pads_into_a_live_block(plugin_run):
    options = {"enable_prefix_caching": True}
    result = plugin_run("decode_padding", options, **IN_PAGE, INPAGE_TEST_BREAK="no pad fix")["result"]
    assert all(rows == [PAD_ROW] for rows in result["strays"].values())
    assert result["live"]
    assert "None" not in result["live"]


# ------------------------------------------------------------------ the pool
def printed(log: str) -> int:
    (line,) = [line for line in log.splitlines() if "KV cache size:" in line]
    return int(line.split("KV cache size:")[1].split("tokens")[0].replace(",", ""))


def test_the_same_memory_holds_far_more_tokens_and_inpage_plan_predicts_both(plugin_run, plugin_model, tmp_path):
    runs = {"in-page": plugin_run("pool", VLLM_COMPACT_GDN="1"), "per-block": plugin_run("pool", VLLM_COMPACT_GDN="0")}
    geometry = Geometry.of(ModelShape.from_file(plugin_model, ssm_dtype="float32"))
    assert geometry.block_tokens == BLOCK
    memory = runs["in-page"]["result"]["num_blocks"] * geometry.block_bytes
    command = [sys.executable, "-m", "inpage", "plan", str(plugin_model), "--memory", f"{memory}B"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "4", "--ssm-dtype", "float32"]
    subprocess.run([*command, "--json", str(tmp_path / "plan.json")], check=True, capture_output=True)
    planned = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    tokens = {layout: printed(run["log"]) for layout, run in runs.items()}
    for layout, run in runs.items():
        assert planned[layout]["num_blocks"] == run["result"]["num_blocks"]
        assert planned[layout]["printed_tokens"] == tokens[layout]
    assert tokens["in-page"] >= 1.6 * tokens["per-block"]


# ------------------------------------------------------------------ what must not be served, and what is not covered
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("off the grid", "starts at position 1135, 367 tokens past the boundary 768"),
        ("null block", "is the null block (id 0)"),
        ("foreign page", "whose page holds attention rows"),
    ],
)
def test_a_start_that_would_serve_a_wrong_state_stops_the_engine(plugin_run, fault, sentence):
    error = plugin_run("stops", {"fault": fault}, **IN_PAGE)["result"]["error"]
    assert error.startswith("StateError: ")
    assert sentence in error


REFUSED = (
    ({}, {"VLLM_CONTIGUOUS_PA": "1"}, "VLLM_CONTIGUOUS_PA=1 makes vllm-gaudi turn prefix caching off"),
    ({}, {"VLLM_DEFRAG": "1"}, "VLLM_DEFRAG=1 moves pages to other blocks"),
    ({"connector": "NixlConnector"}, {}, "KV connectors (--kv-transfer-config) are not covered"),
    ({"pipeline_parallel_size": 2}, {}, "pipeline parallelism (--pipeline-parallel-size 2) is not covered"),
    ({"worker_cls": "somebody.elses.Worker"}, {}, "--worker-cls somebody.elses.Worker replaces the worker"),
)


def test_what_is_not_covered_is_refused_with_one_sentence(plugin_run):
    cases = [(options, environment) for options, environment, _ in REFUSED]
    covered = ({}, {})
    *errors, worker = plugin_run("refusals", {"cases": [*cases, covered]}, **IN_PAGE)["result"]
    for (_, _, sentence), error in zip(REFUSED, errors, strict=True):
        assert error.startswith("ConfigError: ")
        assert sentence in error
    assert worker == "inpage.engines.gaudi.InPageHPUWorker"


def test_without_the_switch_the_worker_is_vllm_gaudis(plugin_run):
    result = plugin_run("refusals", {"cases": [({}, {}), ({"enable_prefix_caching": False}, {})]})["result"]
    assert result == ["vllm_gaudi.v1.worker.hpu_worker.HPUWorker"] * 2


# ------------------------------------------------------------------ the fix pack
PROFILE = ("--profile", "v0.26.0", "gdn-prefix-cache")


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def state_of(python: Path) -> list[object]:
    """What an image has: the names in its site-packages and every byte of vLLM and vllm-gaudi."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(subprocess.check_output([str(python), "-c", program], text=True).strip())
    names = sorted(path.name for path in site_packages.iterdir())
    return [names, digests((site_packages / "vllm").resolve()), digests(Path(CHECKOUT) / "vllm_gaudi")]


def fix(python: Path | str, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(python), str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_apply_check_serve_gate_and_revert_leave_the_image_as_it_was(image, serving, plugin_model, tmp_path):
    """docs/gaudi.md from beginning to end, with vLLM's own server."""
    before = state_of(image)
    assert subprocess.run([str(image), "-c", "import inpage"], capture_output=True, check=False).returncode == 1
    assert fix(image, *PROFILE, "--check").returncode == 1
    applied = fix(image, *PROFILE)
    assert applied.returncode == 0, applied.stderr
    assert fix(image, *PROFILE, "--check").returncode == 0
    log, report = tmp_path / "server.log", tmp_path / "gates.json"
    with serving(image, plugin_model, log, **IN_PAGE) as url:
        command = [sys.executable, "-m", "inpage", "gate", url, "--only", "parity", "--prompts", "12", "--strict"]
        gate = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, check=False)
    assert gate.returncode == 0, gate.stdout + gate.stderr
    assert "inpage: in-page layout, block 384 tokens" in log.read_text(errors="replace")
    reverted = fix(image, "--revert")
    assert reverted.returncode == 0, reverted.stderr
    assert state_of(image) == before


def test_the_same_image_without_the_fix_fails_the_gate(image, serving, plugin_model, tmp_path):
    with serving(image, plugin_model, tmp_path / "server.log", VLLM_COMPACT_GDN="1") as url:
        command = [sys.executable, "-m", "inpage", "gate", url, "--only", "parity", "--prompts", "12", "--block", "384"]
        gate = subprocess.run(command, capture_output=True, text=True, check=False)
    assert gate.returncode == 1, gate.stdout + gate.stderr


def test_a_checkout_with_one_changed_line_is_refused_and_named(tmp_path):
    shutil.copytree(Path(CHECKOUT) / "vllm_gaudi", tmp_path / "vllm_gaudi")
    runner = tmp_path / "vllm_gaudi" / "v1" / "worker" / "hpu_model_runner.py"
    text = runner.read_text()
    runner.write_text(text.replace("self.scheduler_output = scheduler_output\n", "self.scheduler_output = None\n", 1))
    assert runner.read_text() != text
    before = digests(tmp_path)
    refused = fix(sys.executable, "--target", str(tmp_path), *PROFILE)
    assert refused.returncode == 1
    assert "v1/worker/hpu_model_runner.py::HPUModelRunner.execute_model" in refused.stderr
    assert digests(tmp_path) == before
