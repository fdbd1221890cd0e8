"""Hits inside a block (`--prefix-match-unit 64`, blocks of 256) on the real vLLM for CPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
BLOCK, UNIT = 256, 64


def longest_hit(tokens: int) -> int:
    """What a prompt finds of itself: its last mark, or the block before when the prompt ends on a mark."""
    mark = tokens // UNIT * UNIT
    return mark if mark < tokens else (tokens - 1) // BLOCK * BLOCK


def assert_exact(rows):
    assert [row["length"] for row in rows if not row["equal"]] == []
    assert [row["cold"] for row in rows] == [0] * len(rows)
    assert [row["hit"] for row in rows] == [longest_hit(row["length"]) for row in rows]
    assert 192 in [row["hit"] for row in rows]


@pytest.fixture(scope="module")
def inside(engine_run):
    return engine_run("inside", INPAGE="1", **IN_PROCESS)["result"]


def test_every_hit_inside_a_block_equals_cold(inside):
    assert [row for row in inside["rows"] if not row["equal"] or row["cold"]] == []


def test_prompts_around_marks_hit_their_last_mark(inside):
    again = {row["first"]: row["hit"] for row in inside["rows"] if row["kind"] == "again"}
    assert again == {length: longest_hit(length) for length in again}
    assert (again[63], again[65], again[200], again[BLOCK - 1]) == (0, 64, 192, 192)


def test_extensions_hit_the_last_mark_of_the_prompt_before(inside):
    extended = [row for row in inside["rows"] if row["kind"] == "extended"]
    assert [row["hit"] for row in extended] == [row["first"] // UNIT * UNIT for row in extended]


def test_a_prompt_that_parts_before_the_last_mark_falls_back_to_a_block(inside):
    parted = [row["hit"] for row in inside["rows"] if row["kind"] == "parted"]
    assert parted == [0, 768, 960, 640]


def test_a_conversation_hits_the_last_mark_of_each_turn_before(inside):
    talk = [row for row in inside["rows"] if row["kind"] == "talk"]
    assert [row["hit"] for row in talk[1:]] == [row["then"] // UNIT * UNIT for row in talk[:-1]]


def test_blocks_are_copied_and_without_the_copy_a_hit_is_wrong(inside):
    assert inside["counters"]["block_copies"] > 0
    assert not inside["no copy"]


def test_hits_at_marks_equal_cold_with_engine_core_in_its_own_process(engine_run):
    run = engine_run("parity", {"prefix_match_unit": UNIT}, INPAGE="1")
    assert_exact(run["result"]["rows"])
    assert "and at a prompt's last multiple of 64; shortest prompt that can hit 65 tokens" in run["log"]


def test_hits_at_marks_equal_cold_on_two_tensor_parallel_ranks(engine_run):
    arguments = {"tensor_parallel_size": 2, "prefix_match_unit": UNIT}
    run = engine_run("parity", arguments, INPAGE="1", model="wide", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert_exact(run["result"]["rows"])


def test_a_prompt_of_200_tokens_hits_192_with_blocks_of_384(engine_run):
    arguments = {"prefix_match_unit": UNIT, "max_num_batched_tokens": 512, "lengths": [200, 383, 385]}
    run = engine_run("parity", arguments, INPAGE="1", model="large blocks", **IN_PROCESS)
    assert "and at a prompt's last multiple of 64; shortest prompt that can hit 65 tokens" in run["log"]
    rows = [(row["length"], row["hit"], row["equal"]) for row in run["result"]["rows"]]
    assert rows == [(200, 192, True), (383, 320, True), (385, 384, True)]


def test_under_preemption_every_request_equals_native_with_the_same_marks(engine_run):
    arguments = {"prefix_match_unit": UNIT, "num_gpu_blocks_override": 30}
    native = engine_run("crowded", arguments, INPAGE="0", **IN_PROCESS)["result"]
    in_page = engine_run("crowded", arguments, INPAGE="1", **IN_PROCESS)["result"]
    assert native["preemptions"] == in_page["preemptions"] >= 20
    for mine, theirs in zip(in_page["answers"], native["answers"], strict=True):
        assert mine["prompt"] == theirs["prompt"]
        if len(mine["prompt"]) > 1:
            assert mine == theirs
    assert in_page["held"] == 1  # the last request's, which goes home with the next step
    assert in_page["counters"]["block_copies"] > 0


def test_a_pool_too_small_for_a_start_inside_a_block_is_refused(engine_run):
    run = engine_run("refused_pool", {"prefix_match_unit": UNIT, "num_gpu_blocks_override": 24}, INPAGE="1")
    assert "holds 27 blocks at once, the pool has 23" in run["log"]
