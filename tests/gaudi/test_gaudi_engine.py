"""The Gaudi engine on the double, with vLLM's real scheduler: exact hits, every rule broken once, refusals to serve."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from gaudi_world import BLOCK, KERNEL_BLOCK, World, new_data, step_output

from inpage.engines import activation
from inpage.errors import ConfigError, StateError

RELEASES = ("v0.26.0", "v0.30.0")


@pytest.fixture(autouse=True)
def _small_kernel(monkeypatch):
    """The double's kernel takes 4 tokens at a time where vllm-gaudi's takes 128."""
    monkeypatch.setattr(activation, "GAUDI_CHUNK", KERNEL_BLOCK)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * index) % 200 for index in range(length)]


@pytest.fixture(params=RELEASES)
def world(request, gaudi, model):
    return World(gaudi.InPageModelRunner, model, request.param)


def hits(world: World, lengths=(50, 33, 48, 17), before=lambda: None) -> list[tuple[list[float], list[float]]]:
    """Cold and hit answers of prompts and their extensions, unrelated requests between."""
    pairs = []
    for index, length in enumerate(lengths):
        asked, extension = prompt(length, index), [*prompt(length, index), *prompt(20, 90)]
        world.scheduler.reset_prefix_cache()
        cold_extension = world.ask(f"{index} cold extension", extension)
        world.scheduler.reset_prefix_cache()
        before()
        cold = world.ask(f"{index} cold", asked)
        world.ask(f"{index} other", prompt(37, 150 + index))
        pairs.append((cold, world.ask(f"{index} hit", asked)))
        pairs.append((cold_extension, world.ask(f"{index} hit extension", extension)))
        assert world.starts[f"{index} cold"] == world.starts[f"{index} cold extension"] == 0
    return pairs


def equal(pairs) -> int:
    return sum(cold == hit for cold, hit in pairs)


# ------------------------------------------------------------------ exact hits
def test_hits_equal_cold_and_start_at_the_last_whole_block(world):
    assert equal(hits(world)) == 8
    for index, length in enumerate((50, 33, 48, 17)):
        assert world.starts[f"{index} hit"] == (length - 1) // BLOCK * BLOCK
        assert world.starts[f"{index} hit extension"] == length // BLOCK * BLOCK
    assert world.runner.mover.counters.restores == 8
    assert not world.runner.mover.slots.held
    world.runner.mover.check_integrity()


@pytest.mark.parametrize("release", RELEASES)
def test_with_marks_hits_inside_a_block_equal_cold(gaudi, model, release):
    world = World(gaudi.InPageModelRunner, model, release, num_blocks=80, unit=KERNEL_BLOCK)
    lengths = (50, 33, 10, 5, BLOCK - 1)
    assert equal(hits(world, lengths)) == 2 * len(lengths)
    for index, length in enumerate(lengths):
        mark = length // KERNEL_BLOCK * KERNEL_BLOCK
        assert world.starts[f"{index} hit"] == world.starts[f"{index} hit extension"] == mark
    assert world.runner.mover.counters.block_copies > 0
    assert not world.runner.mover.slots.held
    world.runner.mover.check_integrity()


def test_with_marks_and_without_the_copy_of_blocks_hits_are_wrong(gaudi, model):
    world = World(gaudi.InPageModelRunner, model, num_blocks=80, unit=KERNEL_BLOCK)
    world.runner.mover.store.copy_pages = lambda copies: 0
    assert equal(hits(world, (50, 10))) < 4


def test_with_marks_a_crowded_pool_answers_as_an_empty_one(gaudi, model):
    crowded = World(gaudi.InPageModelRunner, model, num_blocks=78, sequences=8, unit=KERNEL_BLOCK)
    roomy = World(gaudi.InPageModelRunner, model, num_blocks=200, unit=KERNEL_BLOCK)
    for index in range(10):
        crowded.add(f"{index}", prompt(60 + 3 * index, index), output=120)
    crowded.finish(3000)
    assert crowded.preempted >= 3
    assert any(position for _, position in crowded.resumes)
    crowded.runner.mover.check_integrity()
    for index in range(10):
        alone = roomy.ask(f"{index}", prompt(60 + 3 * index, index), output=120)
        assert crowded.runner.answers[f"{index}"][-1] == alone[-1]


def test_a_crowded_pool_preempts_resumes_from_cache_and_answers_as_an_empty_one(gaudi, model):
    crowded = World(gaudi.InPageModelRunner, model, num_blocks=17)
    for index in range(6):
        crowded.add(f"{index}", prompt(40 + 3 * index, index), output=30)
    crowded.finish()
    assert crowded.preempted >= 3
    assert any(position for _, position in crowded.resumes)
    crowded.runner.mover.check_integrity()
    assert not crowded.runner.mover.slots.held
    roomy = World(gaudi.InPageModelRunner, model)
    for index in range(6):
        alone = roomy.ask(f"{index}", prompt(40 + 3 * index, index), output=30)
        assert crowded.runner.requests == {}
        assert crowded.runner.answers[f"{index}"][-1] == alone[-1]


def test_priority_preemption_with_two_slots_hands_one_back(gaudi, model):
    world = World(gaudi.InPageModelRunner, model, num_blocks=12, sequences=2, policy="priority")
    world.add("a", prompt(40), output=30, priority=5, arrival=1.0)
    world.add("b", prompt(20, 50), output=40, priority=6, arrival=2.0)
    for _ in range(4):
        world.step()
    world.add("c", prompt(18, 99), output=20, priority=0, arrival=3.0)
    world.finish()
    assert world.preempted
    assert set(world.runner.answers) == {"a", "b", "c"}
    assert not world.runner.mover.slots.held


def test_stock_runs_out_of_slots_on_the_same_requests(gaudi, model):
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    world = World(HPUModelRunner, model, num_blocks=12, sequences=2, policy="priority", with_scheduler_side=False)
    world.scheduler.cache_config.block_size = BLOCK
    world.add("a", prompt(40), output=30, priority=5, arrival=1.0)
    world.add("b", prompt(20, 50), output=40, priority=6, arrival=2.0)
    for _ in range(4):
        world.step()
    world.add("c", prompt(18, 99), output=20, priority=0, arrival=3.0)
    with pytest.raises(IndexError, match="pop from empty list"):
        world.finish()


def test_stock_hits_differ_from_cold(gaudi, model):
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    world = World(HPUModelRunner, model, with_scheduler_side=False)
    assert equal(hits(world)) < 8


def test_slots_go_back_sorted_whatever_the_order_of_the_set(gaudi, model):
    """Tensor-parallel ranks iterate sets in different orders; their free lists must evolve alike."""
    frees = []
    for names in (["b", "a", "c"], ["c", "b", "a"]):
        runner = World(gaudi.InPageModelRunner, model).runner
        starts = [new_data(name, 5, 0, [[1 + 4 * i + g] for g in range(4)]) for i, name in enumerate("abc")]
        runner.execute_model(step_output(starts, dict.fromkeys("abc", 5)))
        runner.sample_tokens(None)
        done = step_output([], {})
        done.preempted_req_ids = dict.fromkeys(names)
        runner.execute_model(done)
        frees.append((runner.mover.slots.free, list(runner._gdn_slot_free_list), runner._gdn_req_to_base_slot))
    assert frees[0] == frees[1] == ((3, 0, 1, 2), [3, 0, 1, 2], {})


# ------------------------------------------------------------------ mutants
def test_without_saves_hits_are_wrong(world, monkeypatch):
    monkeypatch.setattr(world.runner.mover.store, "save", lambda slot, blocks: 0)
    assert equal(hits(world)) < 8


def test_without_restores_hits_are_wrong(world, monkeypatch):
    monkeypatch.setattr(world.runner.mover.store, "restore", lambda slot, blocks: 0)
    assert equal(hits(world)) < 8


def nan_pages(world):
    for part in world.attention:
        part.view(torch.int16).fill_(-1)


def test_pages_full_of_nan_do_not_matter(world):
    pairs = hits(world, before=lambda: nan_pages(world))
    assert equal(pairs) == 8


def test_without_zeroing_pages_full_of_nan_are_read(world, monkeypatch):
    monkeypatch.setattr(world.runner.mover.store, "zero_pages", lambda blocks: None)
    pairs = hits(world, before=lambda: nan_pages(world))
    assert any(value != value for pair in pairs for answers in pair for value in answers)


def test_without_a_zeroed_slot_a_one_token_prompt_reads_the_last_owner(world, monkeypatch):
    world.ask("first", prompt(40))
    clean = world.ask("clean", [5])
    monkeypatch.setattr(world.runner.mover.store, "zero_slot", lambda slot: None)
    assert world.ask("dirty", [5]) != clean


def test_without_hand_back_the_engine_stops_for_want_of_slots(gaudi, model, monkeypatch):
    facts = gaudi.step_facts
    monkeypatch.setattr(gaudi, "step_facts", lambda *a: dataclasses.replace(facts(*a), preempted=(), resumed=()))
    world = World(gaudi.InPageModelRunner, model, num_blocks=17, sequences=3)
    for index in range(6):
        world.add(f"{index}", prompt(40 + 3 * index, index), output=30)
    with pytest.raises(StateError, match=r"no slot for request|still holds slot"):
        world.finish()


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_grid_fix_the_engine_stops_rather_than_serve(gaudi, model, release):
    world = World(gaudi.InPageModelRunner, model, release, with_scheduler_side=False)
    with pytest.raises(StateError, match="passes the boundary 32 without ending on it"):
        hits(world)


# ------------------------------------------------------------------ what must not be served
def start_after_a_prompt(world, computed: int, change=lambda tables: None):
    """A request that starts from the checkpoint of a prompt of two blocks, its tables changed."""
    world.add("writer", prompt(40), output=20)
    assert world.step().num_scheduled_tokens == {"writer": 2 * BLOCK}
    tables = [list(table) for table in world.scheduler.kv_cache_manager.get_block_ids("writer")]
    change(tables)
    world.runner.execute_model(step_output([new_data("reader", 45, computed, tables)], {"reader": 5}))


def test_a_start_at_a_checkpoint_is_served(world):
    start_after_a_prompt(world, 2 * BLOCK)
    assert world.runner.mover.slots.of("reader").position == 2 * BLOCK


def test_a_start_off_the_grid_stops_the_engine(world):
    with pytest.raises(StateError, match=r"request reader starts at position 23, 7 tokens past the boundary 16"):
        start_after_a_prompt(world, 23)


def test_a_null_block_stops_the_engine(world):
    def change(tables):
        tables[1][1] = 0

    with pytest.raises(StateError, match=r"checkpoint of request reader at position 32 is the null block"):
        start_after_a_prompt(world, 2 * BLOCK, change)


def test_a_page_of_attention_stops_the_engine(world):
    def change(tables):
        tables[1][1] = tables[0][0]

    with pytest.raises(StateError, match=r"request reader starts at position 32 from block \d+, whose page holds att"):
        start_after_a_prompt(world, 2 * BLOCK, change)


def test_a_checkpoint_of_another_position_stops_the_engine(world):
    def change(tables):
        for table in tables[1:]:
            table.append(table[1])

    with pytest.raises(StateError, match=r"starts at position 48 from block \d+, whose page holds the checkpoint of p"):
        start_after_a_prompt(world, 3 * BLOCK, change)


# ------------------------------------------------------------------ decode padding
def pad_strays(world) -> set[int]:
    """Rows of computed tokens that change in steps of three decodes, which may write the next rows only."""
    for index in range(3):
        world.add(f"{index}", prompt(30 + index, index), output=12)
    strays: set[int] = set()
    key = world.attention[0]
    for _ in range(20):
        before = key.clone()
        output = world.step()
        if set(output.num_scheduled_tokens.values()) == {1} and len(output.num_scheduled_tokens) == 3:
            changed = set((before != key).flatten(1).any(1).nonzero().flatten().tolist())
            for request in world.runner.requests.values():
                positions = range(request.num_computed_tokens)
                strays |= changed & {request.block_ids[0][p // BLOCK] * BLOCK + p % BLOCK for p in positions}
    return strays


def test_three_decodes_padded_to_four_change_nothing_but_their_own_rows(gaudi, model):
    for runner_class in (gaudi.InPageModelRunner, gaudi.DecodePadModelRunner):
        world = World(runner_class, model, with_scheduler_side=runner_class is gaudi.InPageModelRunner)
        assert world.runner._PAD_BLOCK_ID == 40 * BLOCK // KERNEL_BLOCK
        assert world.runner._PAD_SLOT_ID == 40 * BLOCK
        assert pad_strays(world) == set()


def test_stock_pads_into_the_pool(gaudi, model):
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    world = World(HPUModelRunner, model, with_scheduler_side=False)
    strays = pad_strays(world)
    assert strays == {40 * KERNEL_BLOCK}


def test_a_model_without_states_keeps_its_pad_ids(gaudi, model, monkeypatch):
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    original = HPUModelRunner.__init__

    def init(self, *args):
        original(self, *args)
        self.num_mamba_like_layers = 0

    monkeypatch.setattr(HPUModelRunner, "__init__", init)
    world = World(gaudi.DecodePadModelRunner, model, with_scheduler_side=False)
    assert world.runner._PAD_BLOCK_ID == 40


# ------------------------------------------------------------------ the rest of a worker's life
def test_warm_up_runs_as_vllm_gaudi_has_it_and_leaves_no_slot_behind(world):
    runner = world.runner
    dummy = step_output([new_data(f"w{i}", 8, 0, [[0]] * 4) for i in range(4)], {f"w{i}": 8 for i in range(4)})
    runner.execute_model(dummy, warmup_mode=True)
    runner.sample_tokens(None)
    cleanup = step_output([], {})
    cleanup.finished_req_ids = {f"w{i}" for i in range(4)}
    runner.execute_model(cleanup, warmup_mode=True)
    assert runner.mover.counters.fresh == runner.mover.counters.saves == 0
    assert equal(hits(world)) == 8


def test_the_mamba2_prefill_branch_is_skipped(world):
    assert world.runner.cache_config.enable_prefix_caching
    assert not world.runner.use_prefix_caching


def test_the_start_line_takes_the_place_of_upstreams_warning(gaudi, model, monkeypatch, caplog):
    lines = []
    monkeypatch.setattr(gaudi.logger, "info", lambda text, *values: lines.append(text % values))
    with caplog.at_level(logging.WARNING, logger="vllm"):
        logging.getLogger("vllm").addHandler(caplog.handler)
        World(gaudi.InPageModelRunner, model)
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "does not support prefix caching" not in caplog.text
    (line,) = lines
    assert "block 16 tokens, cached: checkpoints at every multiple of 16 tokens (retention dense)" in line
    assert "shortest prompt that can hit 17 tokens, 40 blocks" in line
    assert "4 slots" in line
    assert "decodes padded with kernel block 160" in line


def test_a_worker_builds_in_page_runners_also_when_it_switches_models(gaudi, model):
    from vllm_gaudi.v1.worker import hpu_worker

    original = hpu_worker.HPUModelRunner
    config = World(gaudi.InPageModelRunner, model).scheduler.vllm_config
    worker = gaudi.InPageHPUWorker(config)
    worker.init_device()
    first = worker.model_runner
    worker.load_model(vllm_config=config)
    assert type(first) is type(worker.model_runner) is gaudi.InPageModelRunner
    assert first is not worker.model_runner
    assert hpu_worker.HPUModelRunner is original


def test_sleep_lets_go_of_the_pages_and_waking_starts_from_nothing(gaudi, model):
    world = World(gaudi.InPageModelRunner, model)
    world.ask("a", prompt(40))
    worker = gaudi.InPageHPUWorker(world.scheduler.vllm_config)
    worker.model_runner = world.runner
    worker.sleep()
    assert world.runner.mover is None
    world.runner.initialize_kv_cache(world.scheduler.kv_cache_config)
    assert world.runner.mover.ledger.counts() == (0, 0)
    with pytest.raises(StateError, match="whose page holds something unknown"):
        world.ask("b", prompt(40))  # the scheduler was not told to forget


def test_compact_gdn_turned_off_in_the_worker_is_refused(gaudi, model, monkeypatch):
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    original = HPUModelRunner.initialize_kv_cache

    def initialize(self, config):
        original(self, config)
        self._compact_gdn_group_ids = set()

    monkeypatch.setattr(HPUModelRunner, "initialize_kv_cache", initialize)
    with pytest.raises(ConfigError, match="it must be 1"):
        World(gaudi.InPageModelRunner, model)


def test_more_gdn_layers_in_a_group_than_attention_layers_is_refused(gaudi):
    with pytest.raises(ConfigError, match="it has no page for its checkpoints"):
        gaudi.InPageModelRunner._page_at([[]], 1, "gdn")
