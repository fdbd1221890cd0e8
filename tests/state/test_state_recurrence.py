"""A toy recurrence through the whole mechanism: after a hit or a resume everything is as after a cold run.

The oracle of `state_toy` compares every state and every output of every step, to the bit; these tests say
what happens to the requests, and that it did happen.
"""

import numpy as np
import pytest
from state_tensors import (
    BLOCK_TOKENS,
    BORDERS,
    GARBAGE,
    HEADS,
    LAYERS,
    LAYOUTS,
    STATE_WORDS,
    Layout,
    TensorWorld,
    cold,
    fold,
    toy_server,
)
from state_toy import Server, everyday, prompt

from inpage.state.ledger import Checkpoint, Ledger
from inpage.state.mover import Mover
from inpage.state.plan import Run, Start, StepFacts
from inpage.state.slots import SlotTable

B = BLOCK_TOKENS


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request) -> Layout:
    return request.param


@pytest.fixture
def server(layout) -> Server:
    return toy_server(layout)


def alone(tokens: tuple[int, ...], outputs: int) -> list[int]:
    """What a server without any other request would have answered."""
    server = toy_server(Layout())
    server.submit("alone", tokens, outputs)
    return server.run().text["alone"]


# ------------------------------------------------------------------------------- the toy is no easy one
def test_the_states_of_the_toy_are_full_of_encodings_that_arithmetic_would_change():
    state = cold(prompt(0, 3 * B + 17))[0]
    floats = state.view(np.float32)
    nans = state[np.isnan(floats)]
    signalling = nans[(nans & 0x00400000) == 0]
    assert len(set(nans.tolist())) > len(set(signalling.tolist())) >= LAYERS * HEADS
    assert (state == 0x80000000).any()
    with np.errstate(invalid="ignore"):
        assert ((floats * np.float32(1)).view(np.uint32) != state).any()


def test_every_word_of_a_state_depends_on_the_first_token():
    tokens = prompt(0, B)
    changed = cold((tokens[0] + 1, *tokens[1:]))[0] != cold(tokens)[0]
    assert changed[:, -100:].mean() > 0.9


# ------------------------------------------------------------------------------------------- hits
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B + 17])
def test_a_second_run_hits_the_last_boundary_before_its_last_token_and_ends_in_the_same_state(server, length):
    for name in ("first", "second"):
        server.submit(name, prompt(0, length), outputs=3)
        server.run()
    assert server.started_at == {"first": [0], "second": [(length - 1) // B * B]}
    assert server.text["second"] == server.text["first"]
    assert server.final_state["second"] == server.final_state["first"]
    assert server.final_state["second"] == cold(tuple(server.text["second"][:-1]))[0].tobytes()


def test_a_prompt_shorter_than_a_block_saves_and_restores_nothing(server):
    for name in ("first", "second"):
        server.submit(name, prompt(0, B - 1))
        server.run()
    counters = server.worker.mover.counters
    assert (counters.saves, counters.restores, counters.fresh) == (0, 0, 2)


def test_a_checkpoint_at_the_very_end_of_a_prompt_serves_a_longer_one(server):
    server.submit("short", prompt(0, 2 * B))
    server.run()
    server.submit("long", prompt(0, 3 * B + 17))
    server.run()
    assert server.started_at["long"] == [2 * B]


def test_the_next_turn_of_a_conversation_hits_a_checkpoint_that_decoding_wrote(server):
    server.submit("turn 1", prompt(0, B - 5), outputs=B + 11)
    text = server.run().text["turn 1"]
    server.submit("turn 2", [*text, 1, 2, 3])
    server.run()
    assert server.started_at["turn 2"] == [2 * B]


@pytest.mark.parametrize(("chunk_blocks", "hit"), [(1, 3 * B), (2, 2 * B), (4, 3 * B)])
def test_requests_that_share_a_prefix_hit_where_a_chunk_ended(server, chunk_blocks, hit):
    shared = prompt(0, 3 * B + 17)
    server.submit("first", shared[:-9])
    server.run(chunk_blocks)
    for name in ("second", "third"):
        server.submit(name, [*shared[: hit + 5], 1, 2, len(name)])
        server.run(chunk_blocks)
    assert server.started_at == {"first": [0], "second": [hit], "third": [hit]}


def test_one_checkpoint_serves_many_requests_at_once(server):
    server.submit("first", prompt(0, 2 * B + 1))
    server.run()
    for number in range(4):
        server.submit(f"r{number}", [*prompt(0, 2 * B), number, number + 1], outputs=5)
    server.step()
    assert len(server.worker.mover.slots.held) == 4
    server.run()
    assert [server.started_at[f"r{number}"] for number in range(4)] == [[2 * B]] * 4


# ---------------------------------------------------------------------------- preemption and abort
def test_a_request_preempted_in_its_decode_resumes_from_a_checkpoint_in_another_slot(server):
    server.submit("a", prompt(0, 2 * B + 3), outputs=B)
    for _ in range(6):
        server.step()
    server.preempt("a")
    server.waiting.reverse()
    server.submit("c", prompt(1, B + 5), outputs=9)
    server.waiting.reverse()
    server.step()
    assert server.worker.mover.slots.held == {"c": 1, "a": 2}
    server.run()
    assert server.started_at == {"a": [0, 2 * B], "c": [0]}
    assert server.text["a"] == alone(prompt(0, 2 * B + 3), B)


def test_a_request_preempted_between_two_chunks_of_its_prefill_resumes(server):
    server.submit("a", prompt(0, 3 * B + 17), outputs=2)
    server.step()
    server.preempt("a")
    server.run()
    assert server.started_at == {"a": [0, B]}
    assert server.text["a"] == alone(prompt(0, 3 * B + 17), 2)


def test_a_request_whose_checkpoints_were_evicted_resumes_cold(server):
    server.submit("a", prompt(0, 2 * B + 3), outputs=3)
    server.step()
    server.step()
    server.preempt("a")
    for block in server.checkpoint_of(prompt(0, 2 * B)) + server.checkpoint_of(prompt(0, B)):
        server.pool.evict_next(block)
    server.submit("b", prompt(1, 2 * B + 3), outputs=2)
    server.waiting.reverse()
    server.run()
    assert server.started_at == {"a": [0, 0], "b": [0]}


def test_a_pool_that_runs_dry_preempts_and_every_answer_stays_the_same(layout):
    server = toy_server(layout, num_blocks=20, slots=3)
    for number in range(4):
        server.submit(f"r{number}", prompt(number, B + 3), outputs=B + 2)
    server.run()
    assert any(len(starts) > 1 for starts in server.started_at.values())
    for number in range(4):
        assert server.text[f"r{number}"] == alone(prompt(number, B + 3), B + 2)


ABORTS = {
    "while it waits": lambda server: None,
    "after its first chunk": lambda server: server.step(),
    "in its decode": lambda server: [server.step() for _ in range(5)],
    "while it is preempted": lambda server: (server.step(), server.preempt("a")),
    "after its end": lambda server: server.run(),
}


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("when", ABORTS)
def test_an_aborted_request_leaves_no_slot_and_no_block_behind(server, when, times):
    server.submit("a", prompt(0, 2 * B + 3), outputs=9)
    ABORTS[when](server)
    for _ in range(times):
        server.abort("a")
    server.submit("b", prompt(0, 2 * B + 3))
    server.run()
    assert server.worker.mover.slots.held == {}
    assert sorted(server.worker.mover.slots.free) == [1, 2, 3, 4]
    assert server.pool.users == {}


# ------------------------------------------------------------------------- pages and slots change hands
def test_attention_that_inherits_a_checkpoint_by_a_new_request_reads_zeros(server):
    server.submit("a", prompt(0, B + 1))
    server.run()
    inherited = server.checkpoint_of(prompt(0, B))[1]
    server.pool.evict_next(inherited)
    server.submit("b", prompt(1, 5), outputs=3)
    server.step()
    assert server.running[0].attention == [inherited]
    server.run()


def test_attention_that_inherits_a_checkpoint_by_growth_in_decode_reads_zeros(server):
    server.submit("a", prompt(0, B + 1))
    server.run()
    inherited = server.checkpoint_of(prompt(0, B))[1]
    server.submit("b", prompt(1, B - 1), outputs=9)
    server.step()
    server.step()
    server.pool.evict_next(inherited)
    server.step()
    assert server.running[0].attention[1:] == [inherited]
    server.run()


def test_attention_that_inherits_a_checkpoint_by_a_resumption_reads_zeros(server):
    server.submit("a", prompt(0, B + 1))
    server.run()
    server.submit("b", prompt(1, B - 1), outputs=3)
    server.step()
    server.preempt("b")
    inherited = server.checkpoint_of(prompt(0, B))[2]
    server.pool.evict_next(inherited)
    server.step()
    assert server.running[0].attention == [inherited]
    server.run()


def test_a_state_block_that_inherits_attention_rows_holds_the_whole_checkpoint(server):
    server.submit("a", prompt(0, 2 * B + 1))
    server.run()
    attention = [server.pool.block_of["attention", prompt(0, end)] for end in (B, 2 * B)]
    server.submit("b", prompt(1, B + 1))
    for block in attention:
        server.pool.evict_next(block)
    server.pool.evict_next(server.pool.free[-1])
    server.step()
    assert set(server.checkpoint_of(prompt(1, B))) > set(attention)
    server.run()
    server.submit("c", prompt(1, B + 9))
    server.run()
    assert server.started_at["c"] == [B]


def test_the_next_owner_of_a_slot_starts_from_zeros_whatever_the_last_one_left(server):
    world = server.worker.world
    assert isinstance(world, TensorWorld)
    world.write_slot(1, np.full((LAYERS, STATE_WORDS), 0x7F800001, np.uint32))
    server.submit("a", prompt(0, 3))
    server.run()
    server.submit("b", prompt(1, 3))
    server.run()
    assert server.final_state["b"] == cold(tuple(server.text["b"][:-1]))[0].tobytes()


# ------------------------------------------------------------------------------ written or not (rule 4)
def test_a_chunk_that_was_scheduled_and_never_computed_is_a_miss(server):
    server.submit("a", prompt(0, B + 1))
    server.step(drop=["a"])
    server.abort("a")
    assert server.checkpoint_of(prompt(0, B))
    server.submit("b", prompt(0, B + 1))
    server.run()
    assert server.started_at == {"b": [0]}


def test_a_decode_step_over_a_boundary_that_was_never_computed_is_a_miss(server):
    server.submit("a", prompt(0, B + 3), outputs=B)
    while not server.running or len(server.running[0].tokens) < 2 * B:
        server.step()
    text = tuple(server.running[0].tokens)
    server.step(drop=["a"])
    server.abort("a")
    assert server.checkpoint_of(text)
    server.submit("b", [*text, 1, 2])
    server.run()
    assert server.started_at["b"] == [B]


# ------------------------------------------------------------------------------------------ the bytes
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("layout", LAYOUTS[:3:2], ids=str)
def test_a_hit_is_exact_wherever_the_border_of_k_and_v_cuts_the_state(layout, border):
    server = toy_server(Layout(layout.one_page_tensor, layout.one_slot_tensor, border))
    for name in ("first", "second"):
        server.submit(name, prompt(0, 2 * B + 5), outputs=3)
        server.run()
    assert server.started_at["second"] == [2 * B]
    assert server.final_state["second"] == server.final_state["first"]


def test_the_padding_of_a_page_behind_the_state_is_never_touched(server):
    world = server.worker.world
    assert isinstance(world, TensorWorld)
    server.submit("a", prompt(0, 2 * B + 1), outputs=B + 1)
    text = tuple(server.run().text["a"])
    for end in (B, 2 * B, 3 * B):
        for group, block in enumerate(server.checkpoint_of(text[:end])):
            page = world.page_words(block)
            layers = slice(group * len(page), (group + 1) * len(page))
            assert (page[:, :STATE_WORDS] == cold(text[:end])[0][layers]).all()
            assert (page[:, STATE_WORDS:] == GARBAGE).all()


@pytest.mark.parametrize("length", [1, 17, B - 1, B])
def test_a_run_from_any_non_zero_initial_state_is_the_reference_from_there(layout, length):
    world = TensorWorld(layout, 10, 3)
    mover = Mover(B, SlotTable(range(1, 4)), Ledger(10), world.store)
    initial = np.random.default_rng(length).integers(0, 2**32, (LAYERS, STATE_WORDS), np.uint32)
    world.write_slot(3, initial)
    world.store.save(3, (4, 5, 6))
    for block in (4, 5, 6):
        mover.ledger.record_checkpoint(block, B)
    world.write_slot(3, ~initial)

    tables = [[4, 7], [5, 8], [6, 9]]
    mover.before_forward(StepFacts(starts=[Start("a", B, tables)]))
    (slot,) = mover.slots_of(["a"])
    assert (world.slot_words(slot) == initial).all()
    final, outputs = fold(world.slot_words(slot), prompt(0, length))
    world.write_slot(slot, final)
    mover.after_forward([Run("a", B, length, tables)])

    expected, expected_outputs = fold(initial, prompt(0, length))
    assert outputs == expected_outputs
    assert (world.slot_words(slot) == expected).all()
    assert (world.slot_words(3) == ~initial).all()
    if length == B:
        assert mover.ledger.content(8) == Checkpoint(2 * B)
        world.store.restore(2, (7, 8, 9))
        assert (world.slot_words(2) == expected).all()


# -------------------------------------------------------------------------------------- all of it at once
@pytest.mark.parametrize("seed", [1, 2])
def test_an_everyday_of_hits_preemptions_and_aborts_is_exact(layout, seed):
    server = everyday(toy_server(layout, num_blocks=26), seed, steps=30)
    counters = server.worker.mover.counters
    resumed = [start for starts in server.started_at.values() for start in starts[1:]]
    assert counters.saves > 10
    assert counters.restores > 5
    assert any(resumed)
