"""The scenarios in which caches of hybrids have gone wrong elsewhere, each on the real scheduler.

The oracle stands beside every step of them (a wrong state raises), so that a scenario only has to bring
its situation about and to say what else must hold. Those marked "upstream" are wrong in vLLM as released;
what inpage does instead stands beside it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sim_worlds import B, finish, preempt, prompt, small_world, step_until

from inpage.engines.activation import refuse_uncovered
from inpage.errors import ConfigError, StateError
from inpage.sim import engine
from inpage.sim.mutants import Everything
from inpage.sim.oracle import OracleMismatch
from inpage.sim.store import GARBAGE, POISON
from inpage.sim.world import World


# 1
def test_a_request_preempted_after_two_boundaries_resumes_on_the_grid_while_another_had_its_slot() -> None:
    world = small_world(max_num_seqs=1, policy="priority")
    victim = world.submit("victim", prompt(1, B + 3), 4 * B, priority=1)
    step_until(world, lambda: victim.request.num_computed_tokens > 3 * B)
    slot = world.worker.mover.slots.held["victim"]
    other = world.submit("other", prompt(2, B), 3)
    preempt(world, "victim")
    step_until(world, lambda: other.request.num_computed_tokens > 0)
    assert world.worker.mover.slots.held == {"other": slot}
    world.run_until_idle()
    assert victim.starts[0] == 0
    assert victim.starts[1] > 0
    assert victim.starts[1] % B == 0


POOL_THAT_DROPS = 20


# 2, upstream: vLLM publishes a hash when it schedules, and can take the step back (rule 4)
def with_a_dropped_step(without: tuple[str, ...] = ()) -> World:
    """A server on which a long prompt was preempted in the very step in which its sixth block was published.

    It runs ahead of a request of higher priority, which then finds three blocks for its next boundary, where
    four are needed. The fourth is one without a hash that the long prompt gave back, so that its published
    blocks stay in the cache: they wait for their author, who looks for them first. `without` breaks rule 4 and
    the ledger.
    """
    world = small_world(
        policy="priority",
        retention=0,
        num_blocks=POOL_THAT_DROPS,
        budget=2 * B + 4,
        chunk_limit=B,
        max_model_len=10 * B,
    )
    if "rule 4" in without:
        world.side.written = Everything(world.side.grid)
    if "ledger" in without:
        world.worker.mover.ledger.check_restorable = lambda *facts: None  # type: ignore[method-assign]
    long = world.submit("long", prompt(1, 6 * B + 1), 2, priority=2)
    world.step()
    world.submit("urgent", prompt(2, B - 3), 2 * B, priority=0)
    step_until(world, lambda: long.request.num_preemptions)
    published = {key for _, key, group, _ in engine.cached_blocks(world.scheduler) if group == 0}
    assert bytes(long.request.block_hashes[5]) in published
    return world


def test_a_hit_on_a_block_that_nothing_has_written_is_a_miss() -> None:
    world = with_a_dropped_step()
    assert world.tally.dropped == 1
    world.run_until_idle()
    assert world.side.counters.refused_unwritten


def test_without_rule_4_a_state_that_was_never_computed_is_served() -> None:
    world = with_a_dropped_step(without=("rule 4", "ledger"))
    with pytest.raises(OracleMismatch, match="that of a cold run") as caught:
        world.run_until_idle()
    assert caught.value.check == "slot"


def test_without_rule_4_the_ledger_stops_the_worker_before_a_wrong_state_is_served() -> None:
    world = with_a_dropped_step(without=("rule 4",))
    with pytest.raises(StateError, match="starts at position"):
        world.run_until_idle()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_on_a_step_whose_request_was_aborted_finds_what_the_step_wrote(asynchronous: bool) -> None:
    world = small_world(asynchronous=asynchronous)
    world.submit("first", prompt(1, 3 * B), 4)
    world.schedule()
    world.abort("first")
    second = world.submit("second", prompt(1, 3 * B), 4)
    world.schedule()
    world.execute()
    world.run_until_idle()
    assert second.starts in ([0], [B], [2 * B])


def test_an_identical_request_may_start_while_the_step_that_writes_its_hit_is_in_flight() -> None:
    world = small_world(asynchronous=True)
    world.submit("first", prompt(1, 4 * B + 2), 4)
    world.schedule()
    second = world.submit("second", prompt(1, 4 * B + 2), 4)
    world.schedule()
    assert len(world.in_flight) == 2
    world.execute()
    world.run_until_idle()
    assert second.starts[0] > 0


# 3
def test_a_page_that_held_a_checkpoint_is_zeroed_before_attention_writes_into_it() -> None:
    world = small_world(num_blocks=24, max_model_len=8 * B)
    inherited = []
    zero_pages = world.worker.store.zero_pages

    def spy(blocks: Any) -> None:
        inherited.extend(block for block in blocks if world.worker.store.pages[block] < 0)
        zero_pages(blocks)

    finish(world, "0", prompt(0, 5 * B), B)
    world.worker.store.zero_pages = spy  # type: ignore[method-assign]
    for number in range(1, 6):
        finish(world, str(number), prompt(number, 5 * B), B)
    assert inherited


def test_attention_rows_are_never_restored_as_a_state() -> None:
    world = small_world()
    world.submit("request", prompt(1, 2 * B + 1), 4)
    world.step()
    block = world.worker.residents["request"].attention[0]
    with pytest.raises(StateError, match="attention rows"):
        world.worker.mover.ledger.check_restorable("other", block, B)


# 4
def test_a_prompt_of_whole_blocks_hits_all_but_its_last_and_a_longer_one_hits_them_all() -> None:
    world = small_world()
    assert finish(world, "cold", prompt(1, 3 * B)) == [0]
    assert finish(world, "again", prompt(1, 3 * B)) == [2 * B]
    assert finish(world, "longer", prompt(1, 3 * B + 5)) == [3 * B]


# 5
def test_a_prompt_below_a_block_neither_hits_nor_saves_and_is_counted() -> None:
    world = small_world()
    assert finish(world, "one", prompt(1, B - 1)) == finish(world, "two", prompt(1, B - 1)) == [0]
    counters = world.worker.mover.counters
    assert (counters.saves, counters.restores, world.side.counters.below_block) == (0, 0, 2)


# 6
def test_a_tail_of_one_token_after_a_hit_continues_from_the_checkpoint() -> None:
    world = small_world()
    finish(world, "cold", prompt(1, 3 * B + 1))
    again = world.submit("again", prompt(1, 3 * B + 1), 2)
    output = world.step()
    assert output.num_scheduled_tokens == {"again": 1}
    assert again.starts == [3 * B]
    world.run_until_idle()


def test_a_prompt_of_one_token_starts_from_an_empty_state_in_a_used_slot() -> None:
    """Upstream decodes it from the state that the recycled block still holds; here the slot is zeroed."""
    world = small_world(max_num_seqs=1)
    finish(world, "before", prompt(1, 2 * B), 3)
    assert finish(world, "one token", prompt(2, 1), 3) == [0]


# 7, upstream: with sparse retention a diverging prefix misses at first sight; a property, not a wrong state
def test_a_shared_prefix_is_kept_where_prompts_part_once_it_has_been_seen_twice() -> None:
    world = small_world(retention=0)
    shared = prompt(1, 2 * B + 5)
    starts = [finish(world, str(n), shared + prompt(n, 2 * B)) for n in range(2, 5)]
    assert starts == [[0], [0], [2 * B]]


# 8, upstream: 0.26.0 schedules no prefill at all with a budget below a block
@pytest.mark.skipif(not engine.SMALL_BUDGETS, reason="this vLLM schedules no prefill with a budget below a block")
def test_a_budget_below_a_block_advances_everyone_and_saves_on_boundaries_only() -> None:
    world = small_world(budget=B // 2 + 1)
    world.submit("talker", prompt(1, 3), 6 * B)
    long = world.submit("long", prompt(2, 5 * B), 2)
    step_until(world, lambda: long.request.num_output_tokens > 0, limit=30)
    world.run_until_idle()
    assert world.worker.mover.counters.saves >= 5 + 6


# 9
def test_an_asynchronous_scheduler_keeps_the_same_checkpoints_as_a_synchronous_one() -> None:
    saved: dict[bool, set[int]] = {}
    for asynchronous in (False, True):
        world = small_world(asynchronous=asynchronous)
        kept: set[int] = set()
        save = world.worker.store.save

        def spy(slot: int, blocks: Any, world: World = world, kept: set[int] = kept, save: Any = save) -> int:
            kept.update(world.worker.store.slots[slot])
            return int(save(slot, blocks))

        world.worker.store.save = spy  # type: ignore[method-assign]
        for number in range(4):
            world.submit(str(number), prompt(number, 3 * B + 5 * number), 2 * B)
        world.run_until_idle()
        saved[asynchronous] = kept
    assert saved[False] == saved[True]
    assert saved[True]


# 10
def test_a_start_off_a_boundary_stops_the_worker() -> None:
    world = small_world()
    entry = world.submit("request", prompt(1, 3 * B), 2)
    entry.request.num_computed_tokens = B + 7
    world.schedule()
    with pytest.raises(StateError, match=f"request request starts at position {B + 7}, 7 tokens past the boundary"):
        world.execute()


# 11 and 18
def configuration(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(
            architecture="Qwen3NextForCausalLM", hf_text_config=SimpleNamespace(layer_types=["linear_attention"])
        ),
        "cache_config": SimpleNamespace(mamba_cache_mode="align"),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "speculative_config": None,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**(parts | changes))


def test_draft_tokens_are_refused_at_start_so_no_checkpoint_can_hold_a_rejected_one() -> None:
    refuse_uncovered(configuration())
    with pytest.raises(ConfigError, match="speculative decoding"):
        refuse_uncovered(configuration(speculative_config=object()))


def test_a_connector_that_brings_tokens_without_their_state_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="know nothing of the states"):
        refuse_uncovered(configuration(kv_transfer_config=object()))


# 12
@pytest.mark.parametrize("stage", ["waiting", "first chunk in flight", "first chunk", "mid-decode", "preempted"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_at_any_stage_gives_slot_and_blocks_back_even_twice(stage: str, asynchronous: bool) -> None:
    world = small_world(asynchronous=asynchronous)
    finish(world, "filler", prompt(1, 3 * B))
    entry = world.submit("victim", prompt(1, 3 * B) + prompt(2, 2 * B), 2 * B)
    if stage == "first chunk in flight":
        world.schedule()
    elif stage == "first chunk":
        world.step()
    elif stage != "waiting":
        step_until(world, lambda: entry.request.num_output_tokens > 3)
    if stage == "preempted":
        preempt(world, "victim")
    world.abort("victim")
    world.abort("victim")
    world.run_until_idle()
    assert sorted(world.worker.mover.slots.free) == [1, 2, 3, 4]


# 13
def test_slots_never_run_dry_however_often_everyone_is_preempted() -> None:
    world = small_world(num_blocks=120)
    for number in range(8):
        world.submit(str(number), prompt(number, B + number), 2 * B)
    for _ in range(12):
        world.preempt_all()
        world.step()
        world.step()
    world.run_until_idle()
    assert world.tally.preemptions > 30


# 14
def test_two_ranks_agree_on_slots_when_several_requests_leave_in_one_step() -> None:
    world = small_world(num_blocks=120)
    for number in range(12):
        world.submit(str(number), prompt(number, B), 1 + number % 2)
    world.run_until_idle()
    assert world.worker.mover.slots.free != tuple(reversed(range(1, 5)))
    assert world.worker.other_rank.free == world.worker.mover.slots.free


# 15
def test_fresh_and_resumed_prefills_in_one_step_keep_their_states_apart() -> None:
    world = small_world(budget=8 * B, num_blocks=120)
    resumed = world.submit("resumed", prompt(1, 3 * B), B)
    step_until(world, lambda: resumed.request.num_output_tokens > 3)
    preempt(world, "resumed")
    world.submit("fresh", prompt(2, 2 * B), 2)
    world.submit("other", prompt(3, B + 3), 2)
    output = world.step()
    assert set(output.num_scheduled_tokens) == {"resumed", "fresh", "other"}
    assert resumed.starts[1] >= 2 * B
    world.run_until_idle()


# 16
def test_the_same_tokens_under_another_salt_or_adapter_never_hit_and_under_the_same_one_do() -> None:
    world = small_world()
    tokens = prompt(1, 3 * B + 1)
    keys = [{}, {"salt": 1}, {"adapter": 1}, {"salt": 1, "adapter": 1}]
    assert [finish(world, f"first {n}", tokens, **key) for n, key in enumerate(keys)] == [[0]] * 4
    assert [finish(world, f"again {n}", tokens, **key) for n, key in enumerate(keys)] == [[3 * B]] * 4


# 17
def test_a_reset_cache_is_cold_and_a_busy_server_refuses_to_be_reset() -> None:
    world = small_world()
    finish(world, "first", prompt(1, 3 * B))
    assert world.reset_cache()
    assert finish(world, "cold", prompt(1, 3 * B)) == [0]
    world.submit("busy", prompt(1, 3 * B), 5)
    world.step()
    assert not world.reset_cache()
    world.run_until_idle()
    assert finish(world, "warm", prompt(1, 3 * B)) == [2 * B]


# 19, upstream: decode padding counts blocks where the table counts kernel blocks
def test_a_decode_pad_that_lands_in_a_live_page_is_seen_by_its_reader() -> None:
    world = small_world()
    world.submit("request", prompt(1, 3 * B), 4)
    world.step()
    pad = world.knobs.num_blocks // (B // 4)  # the block in which kernel block `num_blocks` lies, four to a block
    assert 0 < pad < world.knobs.num_blocks
    live = world.worker.residents["request"].attention[0]
    world.worker.store.write(live, POISON)
    with pytest.raises(OracleMismatch) as caught:
        world.step()
    assert (caught.value.check, caught.value.block) == ("attention", live)


# 20
def test_a_first_chunk_of_three_blocks_writes_one_checkpoint_and_never_the_null_block() -> None:
    world = small_world(budget=8 * B)
    world.submit("request", prompt(1, 3 * B), 1)
    world.step()
    tables = world.worker.residents["request"].states
    assert [table[:2] for table in tables] == [[0, 0]] * engine.GROUPS
    assert all(world.worker.store.pages[table[2]] < 0 for table in tables)
    assert world.worker.mover.counters.saves == 1


# 21
def test_a_ruined_slot_harms_no_later_owner() -> None:
    world = small_world(max_num_seqs=1)
    world.submit("ruined", prompt(1, B), 2)
    world.step()
    world.abort("ruined")
    world.worker.store.slots[1] = [GARBAGE] * engine.GROUPS
    assert finish(world, "next", prompt(2, 2 * B), 3) == [0]


# 22, upstream: some platforms reset the configuration's block size after the pool was built
def test_a_grid_that_changed_after_start_up_is_put_right_or_stops_the_scheduler() -> None:
    world = small_world()
    world.scheduler.cache_config.block_size = 3 * B
    assert finish(world, "cold", prompt(1, 5 * B)) == [0]
    assert world.scheduler.cache_config.block_size == B
    world.scheduler.block_size = 3 * B
    world.submit("late", prompt(2, 5 * B), 1)
    with pytest.raises(StateError, match="block size changed from 16 to 48"):
        world.step()
