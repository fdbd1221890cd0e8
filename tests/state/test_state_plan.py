"""Rule 2: facts of a step in, moves out, nothing touched."""

import pytest

from inpage.errors import ConfigError, StateError
from inpage.state.grid import Grid
from inpage.state.plan import BeforeMoves, Give, Run, Save, Start, StepFacts, checkpoint_blocks, plan_after, plan_before

B = 24
G = Grid(B, B)
M = Grid(B, 8)


def test_a_step_without_facts_plans_nothing():
    assert plan_before(StepFacts(), G) == BeforeMoves()
    assert plan_after([], G) == ()


# ------------------------------------------------------------------------------------------ before
def test_a_cold_start_gets_an_empty_slot_and_all_its_blocks_are_forgotten():
    moves = plan_before(StepFacts(starts=[Start("a", 0, [[0, 7], [0, 8]])]), G)
    assert moves.give == (Give("a", 0, None),)
    assert moves.forget == (7, 8)


def test_a_hit_is_restored_from_the_blocks_that_end_at_its_position():
    moves = plan_before(StepFacts(starts=[Start("a", 2 * B, [[0, 4, 7], [0, 5, 8]])]), G)
    assert moves.give == (Give("a", 2 * B, (4, 5)),)


def test_only_blocks_behind_the_hit_are_forgotten_and_never_the_null_block():
    start = Start("a", 2 * B, [[0, 4, 0, 7], [3, 5, 0, 8]])
    moves = plan_before(StepFacts(starts=[start], new_state_blocks=[9]), G)
    assert moves.forget == (9, 7, 8)


def test_finished_preempted_and_resumed_requests_are_all_handed_back():
    facts = StepFacts(finished={"d", "b"}, preempted={"c", "b"}, resumed=["a", "c"])
    assert set(plan_before(facts, G).hand_back) == {"a", "b", "c", "d"}


def test_new_attention_blocks_are_zeroed_in_the_order_given():
    assert plan_before(StepFacts(new_attention_blocks=[5, 2, 9]), G).zero == (5, 2, 9)


def test_gives_keep_the_order_of_the_scheduler():
    starts = [Start(request, 0, [[7]]) for request in ("z", "a", "m")]
    assert [give.request for give in plan_before(StepFacts(starts=starts), G).give] == ["z", "a", "m"]


@pytest.mark.parametrize("offset", [1, 17, B - 1])
def test_a_start_off_a_boundary_is_refused(offset):
    start = Start("a", 2 * B + offset, [[0, 4, 7]])
    with pytest.raises(
        StateError,
        match=rf"request a starts at position {2 * B + offset}, {offset} tokens past the boundary {2 * B} "
        rf"\(blocks of {B} tokens\): no state was kept there",
    ):
        plan_before(StepFacts(starts=[start]), G)


def test_a_hit_whose_table_is_too_short_is_refused():
    with pytest.raises(
        StateError,
        match=rf"request a has no block for the checkpoint of position {2 * B}: the table of GDN group 1 has 1 "
        rf"blocks of {B} tokens, 2 are needed",
    ):
        plan_before(StepFacts(starts=[Start("a", 2 * B, [[0, 4], [5]])]), G)


# ------------------------------------------------------------------------------------------- after
def test_a_run_that_ends_on_a_boundary_is_saved_into_the_block_that_ends_there():
    runs = [Run("a", 0, B, [[7], [8]]), Run("b", 2 * B - 1, 1, [[0, 4], [0, 5]])]
    assert plan_after(runs, G) == (Save("a", B, (7, 8)), Save("b", 2 * B, (4, 5)))


def test_a_run_over_several_blocks_saves_once_at_its_end():
    assert plan_after([Run("a", B, 3 * B, [[0, 0, 0, 7, 9]])], G) == (Save("a", 4 * B, (7,)),)


@pytest.mark.parametrize(("position", "tokens"), [(0, 1), (0, B - 1), (B, 1), (2 * B + 3, B - 4)])
def test_a_run_that_ends_inside_a_block_is_not_saved(position, tokens):
    assert plan_after([Run("a", position, tokens, [[1, 2, 3]])], G) == ()


@pytest.mark.parametrize(("position", "tokens", "boundary"), [(0, B + 1, B), (B - 1, 2, B), (0, 3 * B + 17, 3 * B)])
def test_a_run_that_passes_a_boundary_without_ending_on_one_is_refused(position, tokens, boundary):
    with pytest.raises(
        StateError,
        match=rf"request a computes tokens \[{position}, {position + tokens}\) in one step and passes the boundary "
        rf"{boundary} without ending on it \(blocks of {B} tokens\)",
    ):
        plan_after([Run("a", position, tokens, [[1, 2, 3, 4]])], G)


def test_a_save_whose_table_is_too_short_is_refused():
    with pytest.raises(
        StateError, match=rf"request a has no block for the checkpoint of position {2 * B}: the table of GDN gr"
    ):
        plan_after([Run("a", B, B, [[4]])], G)


# ---------------------------------------------------------------------------------------- the rule
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_block_of_a_boundary_is_the_one_whose_last_token_ends_there(index):
    tables = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert checkpoint_blocks("a", (index + 1) * B, G, tables) == (10 + index, 20 + index, 30 + index)


@pytest.mark.parametrize("position", [0])
def test_before_the_first_boundary_no_block_ends_and_the_last_one_is_not_taken_for_it(position):
    with pytest.raises(
        StateError, match=rf"request a has no block for the checkpoint of position {position}: .* 0 are needed"
    ):
        checkpoint_blocks("a", position, G, [[10, 11]])


def test_the_plan_passes_the_null_block_on_for_the_ledger_to_refuse():
    assert checkpoint_blocks("a", B, G, [[0], [5]]) == (0, 5)


# marks of 8 tokens in blocks of 24
def test_a_start_on_a_mark_is_restored_from_the_copy_of_its_block_after_the_copies():
    start = Start("a", B + 16, [[0, 7, 9], [0, 8, 10]])
    moves = plan_before(StepFacts(starts=[start], copies=[(3, 7), (4, 8)]), M)
    assert moves.give == (Give("a", B + 16, (7, 8)),)
    assert moves.copy == ((3, 7), (4, 8))
    assert moves.forget == (9, 10)


def test_a_start_inside_a_block_that_nothing_copied_is_refused_with_the_blocks():
    start = Start("a", B + 16, [[0, 7], [0, 8]])
    with pytest.raises(
        StateError, match=r"a starts at position 40, inside blocks \[7, 8\] which no copy .* \(copies into \[7\]\)"
    ):
        plan_before(StepFacts(starts=[start], copies=[(3, 7)]), M)


def test_a_start_off_the_marks_is_refused():
    start = Start("a", B + 15, [[0, 7]])
    with pytest.raises(
        StateError,
        match=r"starts at position 39, 7 tokens past the mark 32 \(marks every 8 tokens\): no state was kept",
    ):
        plan_before(StepFacts(starts=[start], copies=[(3, 7)]), M)


@pytest.mark.parametrize(
    ("end", "prompt", "saved"),
    [(16, 20, True), (16, 16, True), (16, 15, False), (15, 20, False), (B, 5, True), (8, 20, True)],
)
def test_a_run_is_saved_on_a_boundary_and_on_a_mark_of_its_prompt_only(end, prompt, saved):
    saves = plan_after([Run("a", 0, end, [[7], [8]], prompt)], M)
    assert saves == ((Save("a", end, (7, 8)),) if saved else ())


def test_a_run_over_a_boundary_onto_a_mark_is_refused():
    with pytest.raises(StateError, match=r"computes tokens \[8, 32\) in one step and passes the boundary 24"):
        plan_after([Run("a", 8, 24, [[7, 9]], 40)], M)


def test_marks_that_do_not_divide_the_block_are_refused():
    with pytest.raises(ConfigError, match="marks every 7 tokens do not divide blocks of 24 tokens"):
        Grid(B, 7)
    assert not G.has_marks
    assert [M.block_index(at) for at in (1, 24, 25, 48)] == [0, 0, 1, 1]
    assert (G.blocks_at_once(50, 3), M.blocks_at_once(50, 3)) == (9, 14)


@pytest.mark.parametrize(
    ("position", "tokens", "kept"),
    [
        (0, 0, 0),
        (0, B - 1, B - 1),
        (0, B, B),
        (0, B + 1, B),
        (0, 3 * B, 3 * B),
        (0, 3 * B - 1, 2 * B),
        (B - 1, 1, 1),
        (B - 1, 2, 1),
        (B, 1, 1),
        (B + 3, 2 * B, 2 * B - 3),
    ],
)
def test_a_chunk_that_passes_a_boundary_is_cut_at_the_last_one(position: int, tokens: int, kept: int) -> None:
    assert G.tokens_to_boundary(position, tokens) == kept
