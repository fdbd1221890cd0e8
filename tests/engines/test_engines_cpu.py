"""In-page on the real vLLM for CPU: exact hits in every arrangement, preemption, mutants, refusals."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
BLOCK = 256


def assert_exact(rows, block=BLOCK):
    """Every hit equals cold, and hits are as long as whole blocks allow."""
    assert [row["length"] for row in rows if not row["equal"]] == []
    assert [row["cold"] for row in rows] == [0] * len(rows)
    assert [row["hit"] for row in rows] == [(row["length"] - 1) // block * block for row in rows]


def test_hits_equal_cold_in_process(engine_run):
    assert_exact(engine_run("parity", INPAGE="1", **IN_PROCESS)["result"]["rows"])


def test_hits_equal_cold_with_engine_core_in_its_own_process(engine_run):
    run = engine_run("parity", INPAGE="1")
    assert_exact(run["result"]["rows"])
    assert "the configuration says blocks of 128 tokens, the pool has blocks of 256" in run["log"]


def test_hits_equal_cold_with_async_scheduling(engine_run):
    run = engine_run("parity", {"force_async": True}, INPAGE="1")
    assert_exact(run["result"]["rows"])


def test_hits_equal_cold_on_two_tensor_parallel_ranks(engine_run):
    run = engine_run("parity", {"tensor_parallel_size": 2}, INPAGE="1", model="wide", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert_exact(run["result"]["rows"])


def test_stock_vllm_serves_wrong_states_in_the_same_arrangement(engine_run):
    rows = engine_run("parity", INPAGE="0")["result"]["rows"]
    wrong = [row["length"] for row in rows if row["hit"] and not row["equal"]]
    assert wrong, "stock no longer gets hits wrong here: say so in the documentation"


def test_a_flipped_grid_is_put_right(engine_run):
    run = engine_run("parity", {"flip_grid": True}, INPAGE="1", **IN_PROCESS)
    assert_exact(run["result"]["rows"])


def test_without_the_grid_fix_the_engine_stops_rather_than_serve(engine_run):
    run = engine_run("parity", {"flip_grid": True, "without_fix": True}, INPAGE="1", **IN_PROCESS)
    assert "passes the boundary 256 without ending on it" in run["result"]["error"]


def test_under_preemption_every_request_equals_native_with_the_grid_right(engine_run):
    native = engine_run("crowded", INPAGE="0", **IN_PROCESS)["result"]
    in_page = engine_run("crowded", INPAGE="1", **IN_PROCESS)["result"]
    assert (native["runner"], in_page["runner"]) == ("CPUModelRunner", "InPageCPUModelRunner")
    assert native["preemptions"] == in_page["preemptions"] >= 20
    for mine, theirs in zip(in_page["answers"], native["answers"], strict=True):
        assert mine["prompt"] == theirs["prompt"]
        if len(mine["prompt"]) > 1:
            assert mine == theirs
    assert in_page["held"] == 1  # the last request's, which goes home with the next step
    assert in_page["counters"]["restores"] > 0


def first(answer):
    return answer["tokens"][0], answer["logprobs"][0]


def test_one_token_prompts_equal_their_own_cold_run(engine_run):
    """Cold runs alone and beside another prompt, before and after it: products of one row and of many take different
    kernels, so the last bits depend on the shape of the batch, with and without in-page. Stock reads a stale state.
    """
    in_page = engine_run("crowded", INPAGE="1", **IN_PROCESS)["result"]
    ones = [answer for answer in in_page["answers"] if len(answer["prompt"]) == 1]
    assert len(ones) >= 4
    for answer in ones:
        assert first(answer) in [first(cold) for cold in in_page["cold"][str(answer["prompt"][0])]]


@pytest.fixture(scope="module")
def broken(engine_run):
    return engine_run("mutants", INPAGE="1", **IN_PROCESS)["result"]


def test_the_unbroken_rules_pass(broken):
    assert broken["unbroken"] == 3
    assert broken["unbroken on NaN pages"] == 3
    assert broken["distinct answers to one token"] == 1


def test_without_saves_hits_are_wrong(broken):
    assert broken["no save"] < 3


def test_without_restores_hits_are_wrong(broken):
    assert broken["no restore"] < 3


def test_without_zeroing_pages_that_held_nan_answer_nan(broken):
    assert broken["no zeroing"] < 3


def test_without_a_zeroed_slot_a_one_token_prompt_reads_the_last_owner(broken):
    assert broken["distinct answers to one token, no zeroed slot"] > 1


def test_without_hand_back_the_engine_stops_for_want_of_slots(broken):
    assert broken["no hand-back"].startswith("StateError: no slot for request")


def test_without_the_switch_vllm_is_as_without_the_package(engine_run):
    plain = engine_run("untouched", INPAGE="", VLLM_PLUGINS="", **IN_PROCESS)["result"]
    installed = engine_run("untouched", INPAGE="", **IN_PROCESS)["result"]
    assert installed.pop("inpage modules") == ["inpage.engines", "inpage.engines.activation", "inpage.engines.plugin"]
    assert plain.pop("inpage modules") == []
    assert installed == plain
    assert installed["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert installed["scheduler"] == []


REFUSED = {
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding (--speculative-config) is not covered yet",
    ),
    "marks off the kernel's chunks": ({"prefix_match_unit": 32}, "--prefix-match-unit 32 is no multiple of 64"),
    "connectors": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "KV connectors (--kv-transfer-config) are not covered",
    ),
    "pipelines": ({"pipeline_parallel_size": 2}, "pipeline parallelism (--pipeline-parallel-size 2) is not covered"),
    "another worker": ({"worker_cls": "my.Worker"}, "--worker-cls my.Worker replaces the worker"),
}


@pytest.fixture(scope="module")
def refusals(engine_run):
    arguments = {name: extra for name, (extra, _) in REFUSED.items()} | {
        "nothing special": {},
        "a state in every block": {"mamba_cache_mode": "all"},
        "caching off": {"enable_prefix_caching": False, "prefix_match_unit": None},
    }
    return engine_run("refusals", arguments, INPAGE="1")["result"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_with_one_sentence(refusals, name):
    assert refusals[name].startswith("ConfigError: ")
    assert REFUSED[name][1] in refusals[name]


def test_what_vllm_itself_turns_into_align_mode_is_accepted(refusals):
    assert refusals["a state in every block"] == "accepted"


def test_what_is_covered_is_accepted(refusals):
    assert refusals["nothing special"] == "accepted"
    assert refusals["caching off"] == "accepted"


def test_the_start_line_says_what_a_person_needs(engine_run):
    log = engine_run("parity", INPAGE="1")["log"]
    assert (
        "in-page layout, block 256 tokens, cached: checkpoints at every multiple of 256 tokens (retention dense); "
        "shortest prompt that can hit 257 tokens, 60 blocks, pool of 11,170 tokens"
    ) in log


def test_counters_are_logged(engine_run):
    log = engine_run("parity", INPAGE="1")["log"]
    assert "inpage worker: saves" in log
    assert "inpage scheduler: refused hits: 0 never written" in log
