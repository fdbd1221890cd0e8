"""Rule 4: a hit counts only once its content is written."""

import pytest

from inpage.errors import StateError
from inpage.state.grid import Grid
from inpage.state.written import WrittenBlocks

B = 24
ATTENTION = [[11, 12, 13]]


def blocks(written: WrittenBlocks) -> set[int]:
    positions = range(1, 6 * B)
    return {
        block
        for block in range(100)
        if any(written.holds_rows(block, at) or written.holds_state(block, at) for at in positions)
    }


@pytest.fixture
def written() -> WrittenBlocks:
    return WrittenBlocks(Grid(B, B))


def test_nothing_is_written_at_first(written):
    assert len(written) == 0
    assert blocks(written) == set()


def test_a_step_that_ends_on_a_boundary_writes_attention_and_checkpoints(written):
    written.dispatched("a", 0, B, ATTENTION, [[21], [31], [41]])
    assert blocks(written) == {11, 21, 31, 41}
    assert len(written) == 4


def test_a_step_over_two_blocks_writes_both_attention_blocks_and_one_checkpoint(written):
    written.dispatched("a", 0, 2 * B, ATTENTION, [[0, 21]])
    assert blocks(written) == {11, 12, 21}


@pytest.mark.parametrize(("position", "tokens"), [(0, B - 1), (B, 1), (B + 3, 20)])
def test_a_step_that_fills_no_block_writes_nothing(written, position, tokens):
    written.dispatched("a", position, tokens, ATTENTION, [[21, 22]])
    assert blocks(written) == set()


def test_a_decode_step_that_ends_on_the_boundary_writes_the_block(written):
    written.dispatched("a", 2 * B - 1, 1, ATTENTION, [[0, 22]])
    assert blocks(written) == {12, 22}


def test_a_step_that_passes_a_boundary_writes_attention_but_no_checkpoint(written):
    written.dispatched("a", 0, B + 5, ATTENTION, [[21, 22]])
    assert blocks(written) == {11}


def test_the_remainder_of_a_block_that_another_step_began_counts(written):
    written.dispatched("a", 17, B - 17, ATTENTION, [[21]])
    assert blocks(written) == {11, 21}


def test_a_block_with_a_new_owner_is_unwritten_again(written):
    written.dispatched("a", 0, B, ATTENTION, [[21]])
    written.handed_out([21, 77])
    assert blocks(written) == {11}


def test_several_attention_groups_are_all_written(written):
    written.dispatched("a", 0, B, [[11], [51]], [[21]])
    assert blocks(written) == {11, 51, 21}


def test_a_state_table_that_is_too_short_is_refused(written):
    with pytest.raises(
        StateError,
        match=rf"request a has no block for the checkpoint of position {2 * B}: the table of GDN group 0 has 1 blocks",
    ):
        written.dispatched("a", B, B, ATTENTION, [[21]])


# marks of 8 tokens in blocks of 24
@pytest.fixture
def marked() -> WrittenBlocks:
    return WrittenBlocks(Grid(B, 8))


def test_a_step_that_ends_on_a_mark_of_the_prompt_writes_rows_up_to_it_and_a_checkpoint(marked):
    marked.dispatched("a", B, 16, ATTENTION, [[21, 22]], prompt_tokens=B + 20)
    assert marked.holds_rows(12, B + 16)
    assert not marked.holds_rows(12, B + 17)
    assert marked.holds_state(22, B + 16)
    assert not marked.holds_state(22, B + 8)


def test_no_checkpoint_is_left_on_a_mark_behind_the_prompt_or_off_the_marks(marked):
    marked.dispatched("a", B, 16, ATTENTION, [[21, 22]], prompt_tokens=B + 15)
    marked.dispatched("b", B, 15, ATTENTION, [[21, 22]], prompt_tokens=B + 16)
    assert not any(marked.holds_state(22, at) for at in range(4 * B))


def test_a_copy_of_a_state_holds_it_and_a_copy_of_rows_holds_them_up_to_the_start(marked):
    marked.dispatched("a", 0, 16, ATTENTION, [[21]], prompt_tokens=20)
    marked.copied(21, 31)
    marked.copied(11, 41)
    assert marked.holds_state(31, 16)
    assert not marked.holds_rows(41, 1)
    marked.started(16, [[41]])
    assert marked.holds_rows(41, 16)
    assert not marked.holds_rows(41, 17)


def test_a_start_on_a_boundary_writes_nothing(marked):
    marked.started(B, [[11, 12]])
    assert blocks(marked) == set()


def test_a_copy_of_what_nothing_wrote_holds_nothing(marked):
    marked.copied(21, 31)
    assert blocks(marked) == set()
