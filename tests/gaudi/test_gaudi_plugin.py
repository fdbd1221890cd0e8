"""The Gaudi engine on the real vllm-gaudi v0.26.0 and vLLM 0.26.0; only the device is emulated."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import plan_pool

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
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert_exact(plugin_run("parity", options, **IN_PAGE, **OWN_PROCESS)["result"]["rows"])


@pytest.mark.parametrize("process", [{}, OWN_PROCESS])
def test_stock_fails_on_the_same_script(plugin_run, process):
    rows = plugin_run("parity", **STOCK, **process)["result"]["rows"]
    wrong = [row for row in rows if row["hit"] and not row["equal"]]
    assert len(wrong) >= 9
    assert max(row["drift"] or 9.0 for row in wrong) > 0.05


def test_the_start_line_takes_the_place_of_upstreams_warning(plugin_run):
    log = plugin_run("parity", **IN_PAGE)["log"]
    assert "does not support prefix caching" not in log
    assert "inpage: in-page layout, block 384 tokens, shortest prefix that can hit 384 tokens, 64 blocks" in log
    assert "does not support prefix caching" in plugin_run("parity", **STOCK)["log"]


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
    assert result["counters"]["restores"] >= 1


def test_stock_dies_of_the_same_requests(plugin_run):
    result = plugin_run("preemption", {"enable_prefix_caching": False})["result"]
    assert result["error"] == "IndexError: pop from empty list"


# ------------------------------------------------------------------ decode padding
def test_stock_pads_into_a_live_block(plugin_run):
    result = plugin_run("decode_padding")["result"]
    assert (result["runner"], result["pad block"]) == ("HPUModelRunner", 64)
    assert result["rows"] == [64 * 128]
    assert result["steps with strays"] == result["steps"] > 0


@pytest.mark.parametrize(
    ("options", "environment", "runner"),
    [
        ({}, {"INPAGE_HYBRID_DECODE_PAD": "1"}, "DecodePadModelRunner"),
        ({"enable_prefix_caching": True}, IN_PAGE, "InPageModelRunner"),
    ],
)
def test_padded_decodes_leave_every_live_page_as_it_is(plugin_run, options, environment, runner):
    result = plugin_run("decode_padding", options, **environment)["result"]
    assert (result["runner"], result["pad block"]) == (runner, 64 * 3)
    assert result["steps"] > 0
    assert result["rows"] == []


def test_without_the_pad_fix_in_page_pads_into_a_live_block(plugin_run):
    options = {"enable_prefix_caching": True}
    result = plugin_run("decode_padding", options, **IN_PAGE, INPAGE_TEST_BREAK="no pad fix")["result"]
    assert result["rows"] == [64 * 128]


# ------------------------------------------------------------------ the pool
def printed(log: str) -> int:
    (line,) = [line for line in log.splitlines() if "KV cache size:" in line]
    return int(line.split("KV cache size:")[1].split("tokens")[0].replace(",", ""))


def test_the_same_memory_holds_far_more_tokens_and_plan_predicts_both(plugin_run, model):
    geometry = Geometry.of(ModelShape.from_file(model, ssm_dtype="float32"))
    assert geometry.block_tokens == BLOCK
    runs = {"in-page": plugin_run("pool", VLLM_COMPACT_GDN="1"), "per-block": plugin_run("pool", VLLM_COMPACT_GDN="0")}
    memory = runs["in-page"]["result"]["num_blocks"] * geometry.block_bytes
    tokens = {}
    for layout, run in runs.items():
        plan = plan_pool(layout, geometry, memory, max_model_len=4096, session_tokens=4096)
        tokens[layout] = printed(run["log"])
        assert (plan.num_blocks, plan.printed_tokens) == (run["result"]["num_blocks"], tokens[layout])
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


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        ({}, {"VLLM_CONTIGUOUS_PA": "1"}, "VLLM_CONTIGUOUS_PA=1 makes vllm-gaudi turn prefix caching off"),
        ({}, {"VLLM_DEFRAG": "1"}, "VLLM_DEFRAG=1 moves pages to other blocks"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline parallelism (--pipeline-parallel-size 2) is not covered"),
    ],
)
def test_what_is_not_covered_is_refused_with_one_sentence(plugin_run, options, environment, sentence):
    result = plugin_run("refusals", options, **IN_PAGE, **environment)["result"]
    assert result["error"].startswith("ConfigError: ")
    assert sentence in result["error"]


def test_without_the_switch_the_worker_is_vllm_gaudis(plugin_run):
    result = plugin_run("refusals")["result"]
    assert result == {"worker": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"}


# ------------------------------------------------------------------ the fix pack
def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fix(target: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), "--target", str(target), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_apply_check_serve_and_revert_leave_checkout_and_image_as_they_were(plugin_run, tmp_path):
    before = tree(Path(CHECKOUT) / "vllm_gaudi")
    names = ("--profile", "v0.26.0", "gdn-prefix-cache")
    assert fix(tmp_path, *names, "--check").returncode == 1
    applied = fix(tmp_path, *names)
    assert applied.returncode == 0, applied.stderr
    assert fix(tmp_path, *names, "--check").returncode == 0
    # First on the path: this inpage is found before the one that the tests run from.
    run = plugin_run("parity", {"lengths": [900]}, **IN_PAGE, PYTHONPATH=str(tmp_path))
    assert [row["equal"] for row in run["result"]["rows"]] == [True, True]
    assert run["result"]["inpage"].startswith(str(tmp_path))
    assert fix(tmp_path, "--revert").returncode == 0
    assert tree(Path(CHECKOUT) / "vllm_gaudi") == before
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_with_one_changed_line_is_refused_and_named(tmp_path):
    import shutil

    changed = tmp_path / "changed"
    shutil.copytree(Path(CHECKOUT) / "vllm_gaudi", changed / "vllm_gaudi")
    runner = changed / "vllm_gaudi" / "v1" / "worker" / "hpu_model_runner.py"
    text = runner.read_text()
    runner.write_text(text.replace("self.scheduler_output = scheduler_output\n", "self.scheduler_output = None\n", 1))
    assert runner.read_text() != text
    refused = fix(changed, "--profile", "v0.26.0", "gdn-prefix-cache")
    assert refused.returncode == 1
    assert "v1/worker/hpu_model_runner.py::HPUModelRunner.execute_model" in refused.stderr
