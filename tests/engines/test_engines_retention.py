"""The policy `value` on vLLM's real scheduler: what is given up first when blocks are short, and what stays."""

from __future__ import annotations

import pytest
from scheduler_double import BLOCK, answer, make_scheduler, request, run_to_end

from inpage.engines.retention import RETENTION, ValueOrder, retention_wanted
from inpage.engines.scheduler import SchedulerSide
from inpage.errors import ConfigError


def prompt(blocks: int, first: int = 0, rest: int = 3) -> list[int]:
    return [first + index for index in range(blocks * BLOCK + rest)]


def serve(scheduler, name: str, tokens: list[int], output: int = 1) -> int:
    """Serves the request alone; returns the tokens that it hit."""
    scheduler.add_request(request(name, tokens, output=output))
    return run_to_end(scheduler)[name]


def after_a_neighbour(model, retention, blocks: int = 48, neighbour: int = 20) -> tuple[int, object]:
    """What a conversation of six blocks hits after a neighbour's long prompt has run in a pool that is short."""
    scheduler = make_scheduler(model, num_blocks=blocks)
    SchedulerSide(scheduler, retention)
    serve(scheduler, "first turn", prompt(6))
    serve(scheduler, "neighbour", prompt(neighbour, first=500))
    return serve(scheduler, "next turn", prompt(6) + prompt(1, first=300)), scheduler


def test_what_a_long_prompt_leaves_behind_goes_before_another_conversation(model):
    assert after_a_neighbour(model, "value")[0] == 6 * BLOCK


def test_with_lru_alone_the_long_prompt_pushes_the_conversation_out(model):
    assert after_a_neighbour(model, "dense")[0] < 6 * BLOCK


def test_in_a_roomy_pool_a_prefix_that_parts_anywhere_hits_at_first_sight(model):
    scheduler = make_scheduler(model, num_blocks=400)
    SchedulerSide(scheduler, "value")
    serve(scheduler, "whole", prompt(9))
    for shared in (8, 5, 2, 1):
        parted = prompt(9)[: shared * BLOCK] + prompt(3, first=500 + 50 * shared)
        assert serve(scheduler, f"parted at {shared}", parted) == shared * BLOCK


def test_of_64_prompts_that_share_a_prefix_every_one_from_the_second_on_hits(model):
    scheduler = make_scheduler(model, num_blocks=2000)
    SchedulerSide(scheduler, "value")
    hits = [serve(scheduler, str(i), prompt(5) + prompt(2, first=100 + 5 * i)) for i in range(64)]
    assert hits == [0] + [5 * BLOCK] * 63


def fill(scheduler, blocks: int = 12) -> None:
    """Long prompts until everything that was left behind is gone."""
    for round_ in range(4):
        serve(scheduler, f"fill {round_}", prompt(blocks, first=1000 + 300 * round_))


def junction(model) -> int:
    """What a prompt hits at a junction of two blocks, from which three others have started, when the pool is short."""
    scheduler = make_scheduler(model, num_blocks=60)
    SchedulerSide(scheduler, "value")
    for index in range(4):
        serve(scheduler, f"child {index}", prompt(2, rest=0) + prompt(2, first=200 + 50 * index))
    serve(scheduler, "long", prompt(11, first=1000))
    return serve(scheduler, "one more", prompt(2, rest=0) + prompt(2, first=700))


def test_a_junction_from_which_three_prompts_have_started_stays(model):
    assert junction(model) == 2 * BLOCK


def test_without_the_rule_on_junctions_it_is_given_up_first(model, monkeypatch):
    monkeypatch.setattr("inpage.engines.retention.SHARED", 1000)
    assert junction(model) == 0


def preempted(model) -> int:
    """Where a request goes on that was preempted while it ran alone, its older checkpoints given up."""
    scheduler = make_scheduler(model, num_blocks=40)
    side = SchedulerSide(scheduler, "value")
    scheduler.add_request(request("a", prompt(8), output=40))
    while scheduler.requests["a"].num_computed_tokens < 8 * BLOCK:
        answer(scheduler, scheduler.schedule())
    running = scheduler.requests["a"]
    scheduler.running.remove(running)
    scheduler._preempt_request(running, 0.0)
    # Somebody takes all that was left behind, and gives it back.
    behind = len(side.order._left_behind)
    taken = side.pool.get_new_blocks(side.pool.get_num_free_blocks() - 8 - 6)
    side.pool.free_blocks(taken)
    assert behind > 0
    output = scheduler.schedule()
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}
    return output.scheduled_cached_reqs.num_computed_tokens[0]


def test_a_preempted_request_goes_on_from_its_newest_checkpoint(model):
    assert preempted(model) == 8 * BLOCK


def test_blocks_in_use_are_never_moved(model):
    scheduler = make_scheduler(model, num_blocks=48)
    side = SchedulerSide(scheduler, "value")
    serve(scheduler, "first", prompt(6))
    (block, key), *_ = side.order._left_behind.items()
    side.pool.touch([side.pool.blocks[block]])
    before = side.pool.get_num_free_blocks()
    side.pool.get_new_blocks(before)
    assert side.pool.blocks[block].block_hash == key
    assert side.pool.get_num_free_blocks() == 0


def test_a_checkpoint_that_was_left_behind_and_is_hit_again_is_not_given_up_while_it_is_used(model):
    scheduler = make_scheduler(model, num_blocks=48)
    side = SchedulerSide(scheduler, "value")
    serve(scheduler, "first", prompt(6))
    assert serve(scheduler, "second", prompt(3, rest=0) + prompt(2, first=300), output=2 * BLOCK) == 3 * BLOCK
    fill(scheduler)
    assert side.pool.get_num_free_blocks() == 47


def test_where_vllm_keeps_checkpoints_sparsely_its_own_retention_counts(model):
    scheduler = make_scheduler(model, num_blocks=40)
    scheduler.kv_cache_manager.coordinator.retention_interval = 0
    assert SchedulerSide(scheduler, "value").order is None


def test_dense_is_the_default_and_value_can_be_asked_for(model, monkeypatch):
    monkeypatch.delenv(RETENTION, raising=False)
    assert SchedulerSide(make_scheduler(model, num_blocks=40)).order is None
    monkeypatch.setenv(RETENTION, "value")
    assert isinstance(SchedulerSide(make_scheduler(model, num_blocks=40)).order, ValueOrder)


def test_a_policy_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(RETENTION, "sparse")
    with pytest.raises(ConfigError, match="INPAGE_RETENTION='sparse' is neither value nor dense"):
        retention_wanted()
