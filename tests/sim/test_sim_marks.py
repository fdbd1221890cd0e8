"""Hits inside a block on the real scheduler: blocks of 16 tokens, marks every 4. The oracle stands beside each step."""

from __future__ import annotations

import pytest
from sim_worlds import B, finish, preempt, prompt, small_world, step_until

from inpage.errors import ConfigError

MARK = 4


def marked(**changes):
    return small_world(mark_tokens=MARK, **changes)


@pytest.mark.parametrize(
    ("length", "hit"), [(3, 0), (4, 0), (5, 4), (10, 8), (B - 1, 12), (B + 1, B), (3 * B + 9, 3 * B + 8)]
)
def test_a_prompt_sent_again_hits_its_last_mark(length: int, hit: int) -> None:
    world = marked()
    assert finish(world, "first", prompt(1, length)) == [0]
    assert finish(world, "again", prompt(1, length)) == [hit]


def test_a_prompt_that_ends_on_a_mark_hits_the_boundary_before_it() -> None:
    world = marked()
    finish(world, "first", prompt(1, 2 * B + 8))
    assert finish(world, "again", prompt(1, 2 * B + 8)) == [2 * B]
    assert finish(world, "longer", prompt(1, 2 * B + 8) + prompt(2, 5)) == [2 * B + 8]


def test_a_prompt_that_parts_inside_the_last_block_falls_back_to_its_boundary() -> None:
    world = marked()
    finish(world, "first", prompt(1, 2 * B + 10))
    assert finish(world, "parted", prompt(1, 2 * B + 6) + prompt(2, 9)) == [2 * B]


def test_two_requests_that_start_from_one_mark_write_into_blocks_of_their_own() -> None:
    world = marked()
    finish(world, "first", prompt(1, B + 9))
    entries = [world.submit(f"{seed}", prompt(1, B + 9) + prompt(seed, 20), 12) for seed in (2, 3, 4)]
    world.run_until_idle()
    assert [entry.starts for entry in entries] == [[B + 8]] * 3
    assert world.worker.mover.counters.block_copies >= 3 * 4


def test_a_running_request_goes_on_while_its_mark_is_kept_in_a_copy() -> None:
    world = marked()
    long = world.submit("long", prompt(1, B + 9), 3 * B)
    step_until(world, lambda: long.request.num_computed_tokens > 2 * B)
    assert finish(world, "again", prompt(1, B + 9)) == [B + 8]


def test_a_request_preempted_after_its_mark_resumes_from_it() -> None:
    world = marked(max_num_seqs=1, policy="priority")
    victim = world.submit("victim", prompt(1, B + 9), 4, priority=1)
    step_until(world, lambda: victim.request.num_computed_tokens > B + 8)
    preempt(world, "victim")
    world.run_until_idle()
    assert victim.starts == [0, B + 8]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mark_of_a_step_in_flight_is_found_only_when_the_step_is_dispatched(asynchronous: bool) -> None:
    world = marked(asynchronous=asynchronous)
    world.submit("first", prompt(1, 10), 4)
    world.schedule()
    second = world.submit("second", prompt(1, 10), 4)
    world.run_until_idle()
    assert second.starts in ([0], [8])


def test_a_pool_that_cannot_hold_a_start_inside_a_block_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="a request of --max-model-len 256 tokens that starts inside a block holds 27 "
    ):
        marked(num_blocks=27)
    marked(num_blocks=28)


# vllm#40696. On CPU no unit does this: of the divisors of 528 none is a multiple of the kernel's 64 tokens.
@pytest.mark.parametrize(
    ("mark", "hits"), [(0, {480: 0, 552: 528}), (48, {480: 0, 552: 528}), (44, {480: 440, 552: 528})]
)
def test_prompts_of_480_and_552_tokens_on_blocks_of_528(mark: int, hits: dict[int, int]) -> None:
    for length, hit in hits.items():
        world = small_world(block_tokens=528, num_blocks=60, budget=656, max_model_len=4096, mark_tokens=mark)
        assert [finish(world, f"{length}, {turn}", prompt(1, length), 1)[0] for turn in range(3)] == [0, hit, hit]
