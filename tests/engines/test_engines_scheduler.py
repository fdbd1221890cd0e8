"""The scheduler side on vLLM's real scheduler: the chunk grid, and rule 4 under priority preemption."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from scheduler_double import BLOCK, answer, make_scheduler, request, run_to_end
from vllm.v1.request import RequestStatus

from inpage.engines.scheduler import SchedulerSide
from inpage.errors import ConfigError, StateError


def prompt(length: int, first: int = 0) -> list[int]:
    return [first + index for index in range(length)]


@pytest.fixture
def scheduler(model):
    scheduler = make_scheduler(model, num_blocks=40)
    SchedulerSide(scheduler)
    return scheduler


def test_a_prompt_that_was_served_hits_up_to_its_last_whole_block(scheduler):
    scheduler.add_request(request("a", prompt(50)))
    run_to_end(scheduler)
    scheduler.add_request(request("b", prompt(50)))
    assert run_to_end(scheduler) == {"b": 48}


def test_a_prompt_of_whole_blocks_computes_its_last_block_again(scheduler):
    scheduler.add_request(request("a", prompt(3 * BLOCK)))
    run_to_end(scheduler)
    scheduler.add_request(request("b", prompt(3 * BLOCK)))
    assert run_to_end(scheduler) == {"b": 2 * BLOCK}


def test_a_prompt_shorter_than_a_block_never_hits_and_is_counted(scheduler):
    for name in "ab":
        scheduler.add_request(request(name, prompt(BLOCK - 1)))
        assert run_to_end(scheduler) == {name: 0}
    assert scheduler.inpage.counters.below_block == 2


def test_chunks_end_on_blocks_although_the_configuration_says_otherwise(model):
    scheduler = make_scheduler(model, num_blocks=40, budget=28)
    SchedulerSide(scheduler)
    scheduler.cache_config.block_size = 4
    scheduler.add_request(request("a", prompt(50)))
    ends = []
    while not ends or ends[-1] < 50:
        output = scheduler.schedule()
        ends.append(scheduler.requests["a"].num_computed_tokens)
        answer(scheduler, output)
    assert ends == [16, 32, 48, 50]
    assert scheduler.cache_config.block_size == BLOCK


def test_a_resumed_request_whose_length_is_whole_blocks_ends_its_chunk_on_a_boundary(model):
    scheduler = make_scheduler(model, num_blocks=40, budget=3 * BLOCK - 1)
    side = SchedulerSide(scheduler)
    scheduler.add_request(request("a", prompt(3 * BLOCK - 1)))
    while scheduler.requests["a"].num_tokens < 3 * BLOCK:
        answer(scheduler, scheduler.schedule())
    assert side.counters.cut == 0
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 2 * BLOCK}
    assert side.counters.cut == 1


def test_a_chunk_that_ends_in_front_of_an_input_of_the_encoder_ends_on_a_boundary(model):
    scheduler = make_scheduler(model, num_blocks=40, budget=64)
    # No model with an encoder is small enough: the encoder's budget is the double, all else is vLLM's.
    scheduler._try_schedule_encoder_inputs = lambda *args, **kwargs: ([], 2 * BLOCK + 5, 0, [])
    side = SchedulerSide(scheduler)
    picture = request("a", prompt(60))
    picture.mm_features = [object()]
    assert picture.has_encoder_inputs
    scheduler.add_request(picture)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 2 * BLOCK}
    assert side.counters.cut == 1


def test_a_block_size_that_changes_after_the_pool_was_built_stops_the_engine(scheduler):
    scheduler.block_size = 2 * BLOCK
    scheduler.add_request(request("a", prompt(50)))
    with pytest.raises(StateError, match="block size changed from 16 to 32 tokens after the pool was built"):
        scheduler.schedule()


def test_two_requests_with_one_prompt_in_the_same_step_both_get_there(model):
    scheduler = make_scheduler(model, num_blocks=40, budget=64)
    SchedulerSide(scheduler)
    scheduler.add_request(request("a", prompt(40)))
    scheduler.add_request(request("b", prompt(40)))
    started = run_to_end(scheduler)
    assert started == {"a": 0, "b": 32}
    assert scheduler.inpage.counters.deferred >= 1


class Oracle:
    """Which blocks the dispatched steps have really filled: attention by rows, GDN blocks by saves."""

    def __init__(self, scheduler) -> None:
        self.scheduler, self.filled = scheduler, {}

    def dispatch(self, output) -> None:
        """Book what a step writes."""
        for name, tokens in output.num_scheduled_tokens.items():
            done = self.scheduler.requests[name]
            end = done.num_computed_tokens
            attention, *states = self.scheduler.kv_cache_manager.get_block_ids(name)
            for position in range(end - tokens, end):
                key = tuple(done.all_token_ids[: position + 1])
                self.filled[attention[position // BLOCK], position % BLOCK] = key
            if end % BLOCK == 0:
                for table in states:
                    self.filled[table[end // BLOCK - 1], "state"] = tuple(done.all_token_ids[:end])

    def wrong_starts(self, output) -> list[str]:
        """Requests that start from blocks which nothing has filled with their tokens."""
        wrong = []
        cached = output.scheduled_cached_reqs
        starts = [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs]
        starts += [
            (name, cached.num_computed_tokens[index], cached.new_block_ids[index])
            for index, name in enumerate(cached.req_ids)
            if name in cached.resumed_req_ids
        ]
        for name, position, (attention, *states) in starts:
            tokens = self.scheduler.requests[name].all_token_ids
            rows = all(
                self.filled.get((attention[p // BLOCK], p % BLOCK)) == tuple(tokens[: p + 1]) for p in range(position)
            )
            saved = position == 0 or all(
                self.filled.get((table[position // BLOCK - 1], "state")) == tuple(tokens[:position]) for table in states
            )
            if not (rows and saved):
                wrong.append(f"{name} at {position}")
        return wrong


class Taken(NamedTuple):
    """What came of `taken_back_in_its_own_step`."""

    wrong: list[str]
    refused: int


def taken_back_in_its_own_step(model, with_rule_4: bool) -> Taken:
    """A request reaches a boundary in the very step in which a more important one takes its blocks.

    `keeper` runs with the same prompt and keeps the attention blocks alive; its checkpoints were evicted by
    `filler`. `low` computes them anew, a block a step. In the step that takes it to token 80, `high` needs blocks
    and takes those of `low`: the hash of its checkpoint is published, the step will never run. When `low` comes
    back, that hash completes a match of 80 tokens.
    """
    scheduler = make_scheduler(model, num_blocks=28, budget=40, policy="priority")
    scheduler.scheduler_config.long_prefill_token_threshold = BLOCK
    # LRU alone: what is evicted first is part of the scene.
    side = SchedulerSide(scheduler, "dense") if with_rule_4 else None
    oracle, wrong = Oracle(scheduler), []

    def step() -> None:
        output = scheduler.schedule()
        wrong.extend(oracle.wrong_starts(output))
        oracle.dispatch(output)
        answer(scheduler, output, token=7)

    def until_done(name: str) -> None:
        while name in scheduler.requests:
            step()

    scheduler.add_request(request("keeper", prompt(90), output=60, priority=0))
    while scheduler.requests["keeper"].num_computed_tokens <= 90:
        step()
    scheduler.add_request(request("filler", prompt(75, first=500), output=1, priority=5))
    until_done("filler")
    scheduler.add_request(request("low", prompt(84), output=8, priority=9))
    step()
    scheduler.add_request(request("high", prompt(14, first=900), output=30, priority=1))
    until_done("low")
    return Taken(wrong, side.counters.refused_unwritten if side else 0)


def test_a_hit_on_a_block_that_was_published_but_never_written_is_a_miss(model):
    taken = taken_back_in_its_own_step(model, with_rule_4=True)
    assert taken.wrong == []
    assert taken.refused == 1


def test_without_rule_4_stock_vllm_serves_such_a_hit(model):
    taken = taken_back_in_its_own_step(model, with_rule_4=False)
    assert taken.wrong == ["low at 80"]


def test_an_aborted_request_leaves_only_what_its_dispatched_steps_have_written(model):
    scheduler = make_scheduler(model, num_blocks=40)
    SchedulerSide(scheduler)
    oracle = Oracle(scheduler)
    scheduler.add_request(request("a", prompt(90)))
    for _ in range(3):
        output = scheduler.schedule()
        oracle.dispatch(output)
        answer(scheduler, output)
    output = scheduler.schedule()  # dispatched, and still on its way when the abort comes
    oracle.dispatch(output)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("b", prompt(90)))
    after = scheduler.schedule()
    assert oracle.wrong_starts(after) == []
    assert after.scheduled_new_reqs[0].num_computed_tokens == 4 * BLOCK


def test_a_pool_that_is_too_small_for_a_start_inside_a_block_is_refused(model):
    with pytest.raises(
        ConfigError, match="1024 tokens that starts inside a block holds 75 blocks at once, the pool has 39"
    ):
        SchedulerSide(make_scheduler(model, num_blocks=40, unit=BLOCK // 2))
    SchedulerSide(make_scheduler(model, num_blocks=76, unit=BLOCK // 2))
