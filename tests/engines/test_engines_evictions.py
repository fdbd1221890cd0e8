"""Evicted checkpoints on vLLM's real scheduler, and hit lengths from other people's reports."""

from __future__ import annotations

import pytest
from scheduler_double import BLOCK, make_scheduler, request, run_to_end

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


def test_both_counts_are_among_the_totals_that_go_to_metrics(scheduler):
    assert [serve(scheduler, name, list(range(50))) for name in "ab"] == [0, 48]
    unrelated(scheduler, 12)
    side = scheduler.inpage
    totals = side.totals()
    assert totals.keys() <= COUNTER_FIELDS
    assert totals["evicted_after_hit"] == len(side.state_groups)
    assert totals["evicted_before_hit"] == side.evictions.before_hit > 0
    assert totals["cut"] == 0


def test_a_reset_of_the_cache_is_not_an_eviction(scheduler):
    serve(scheduler, "a", list(range(50)))
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    evictions = scheduler.inpage.evictions
    assert (evictions.before_hit, evictions.after_hit) == (0, 0)
