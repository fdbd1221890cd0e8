"""Checkpoints evicted or missing, on vLLM's real scheduler, and hit lengths from other people's reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from scheduler_double import BLOCK, answer, make_scheduler, request, run_to_end
from vllm.v1.metrics.stats import SchedulerStats

from inpage.engines.metrics import PREFIX
from inpage.engines.scheduler import SchedulerSide
from inpage.metrics.catalogue import COUNTER_FIELDS


def serve(scheduler, name: str, tokens: list[int]) -> int:
    scheduler.add_request(request(name, tokens))
    return run_to_end(scheduler)[name]


def unrelated(scheduler, count: int) -> None:
    for index in range(count):
        serve(scheduler, f"other-{index}", [1000 * (index + 1) + token for token in range(50)])


@pytest.fixture
def scheduler(model):
    scheduler = make_scheduler(model, num_blocks=40)
    SchedulerSide(scheduler)
    return scheduler


def test_a_prompt_of_seven_blocks_and_a_half_hits_from_the_second_time_on(scheduler):
    tokens = list(range(7 * BLOCK + BLOCK // 2))
    assert [serve(scheduler, name, tokens) for name in "abc"] == [0, 7 * BLOCK, 7 * BLOCK]


def test_checkpoints_that_no_prompt_came_back_to_are_evicted_before_their_hit(scheduler):
    unrelated(scheduler, 8)
    evictions = scheduler.inpage.evictions
    assert evictions.before_hit > 0
    assert evictions.after_hit == 0


def test_a_checkpoint_that_was_hit_is_evicted_after_its_hit_once_for_every_gdn_group(scheduler):
    assert [serve(scheduler, name, list(range(50))) for name in "ab"] == [0, 48]
    unrelated(scheduler, 12)
    evictions = scheduler.inpage.evictions
    assert evictions.after_hit == len(scheduler.inpage.state_groups)


def test_both_counts_go_to_metrics_with_the_scheduler_s_statistics(scheduler):
    assert [serve(scheduler, name, list(range(50))) for name in "ab"] == [0, 48]
    unrelated(scheduler, 12)
    side = scheduler.inpage
    totals = side.totals()
    assert totals.keys() <= COUNTER_FIELDS
    assert totals["evicted_after_hit"] == len(side.state_groups)
    assert totals["evicted_before_hit"] == side.evictions.before_hit > 0
    assert totals["cut"] == 0
    side._report.receive(SimpleNamespace(inpage={}))  # a worker's snapshot
    sent = side._make_stats(SchedulerStats).waiting_lora_adapters
    assert {name: sent[PREFIX + name] for name in totals} == totals


def test_a_reset_of_the_cache_is_not_an_eviction(scheduler):
    serve(scheduler, "a", list(range(50)))
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    evictions = scheduler.inpage.evictions
    assert (evictions.before_hit, evictions.after_hit) == (0, 0)


def forked(at: int, other: int) -> list[int]:
    """A prompt of 90 tokens that leaves the sequence 0, 1, 2, ... at a position."""
    return [*range(at), *range(other, other + 90 - at)]


@pytest.mark.parametrize(
    ("budget", "hits", "tokens"),
    [
        # A chunk a block: a checkpoint wherever attention ends.
        (24, [0, 80, 32, 32], [0, 0, 0, 0]),
        # Chunks of several blocks end at 80 only; the first that forks at 40 leaves the checkpoint at 32.
        (100, [0, 80, 0, 32], [0, 0, 32, 0]),
    ],
)
def test_tokens_that_attention_found_without_a_checkpoint_are_counted(model, budget, hits, tokens):
    scheduler = make_scheduler(model, num_blocks=60, budget=budget)
    counters = SchedulerSide(scheduler).counters
    found, added = [], []
    for index, prompt in enumerate([forked(90, 0), forked(90, 0), forked(40, 500), forked(40, 600)]):
        before = counters.attention_only_tokens
        found.append(serve(scheduler, f"{index}", prompt))
        added.append(counters.attention_only_tokens - before)
    assert (found, added) == (hits, tokens)


def test_a_hit_below_what_attention_found_counts_the_rest_once_however_often_the_request_starts(model):
    scheduler = make_scheduler(model, num_blocks=60, budget=100)
    counters = SchedulerSide(scheduler).counters
    serve(scheduler, "a", forked(90, 0))
    serve(scheduler, "b", forked(40, 500))
    scheduler.add_request(request("c", forked(75, 700)))
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 32
    assert counters.attention_only_tokens == 32 + (64 - 32)
    answer(scheduler, output)
    scheduler.running.remove(preempted := scheduler.requests["c"])
    scheduler._preempt_request(preempted, 0.0)
    run_to_end(scheduler)
    assert counters.attention_only_tokens == 64


def test_with_marks_tokens_found_without_a_checkpoint_are_counted_in_whole_blocks(model):
    unit = BLOCK // 2
    scheduler = make_scheduler(model, num_blocks=90, budget=100, unit=unit)
    counters = SchedulerSide(scheduler).counters
    for name, prompt in (("a", forked(90, 0)), ("b", forked(45, 500))):
        scheduler.add_request(request(name, prompt, unit=unit))
        assert run_to_end(scheduler)[name] == 0
    assert counters.attention_only_tokens == 32
