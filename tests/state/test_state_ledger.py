"""Rule 5: the ledger knows what each page holds, and refuses every other restore."""

import pytest

from inpage.errors import StateError
from inpage.state.ledger import Attention, Checkpoint, Ledger


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(num_blocks=10)


def test_a_page_is_unknown_until_something_is_recorded(ledger):
    assert ledger.content(3) is None
    assert ledger.counts() == (0, 0)


def test_the_ledger_follows_a_block_from_attention_to_checkpoint_to_unknown(ledger):
    ledger.record_attention([3, 4])
    assert ledger.content(3) == Attention()
    ledger.forget([3])
    assert ledger.content(3) is None
    ledger.record_checkpoint(3, 48)
    assert ledger.content(3) == Checkpoint(48)
    assert ledger.counts() == (1, 1)
    ledger.record_attention([3])
    assert ledger.content(3) == Attention()
    assert ledger.counts() == (2, 0)


def test_forgetting_an_unknown_block_changes_nothing(ledger):
    ledger.record_checkpoint(3, 24)
    ledger.forget([0, 5, 99])
    assert ledger.counts() == (0, 1)


def test_the_checkpoint_of_exactly_the_start_position_is_restorable(ledger):
    ledger.record_checkpoint(9, 48)
    ledger.check_restorable("a", 9, 48)


def test_a_newer_checkpoint_replaces_the_older_one(ledger):
    ledger.record_checkpoint(5, 24)
    ledger.record_checkpoint(5, 48)
    ledger.check_restorable("a", 5, 48)


@pytest.mark.parametrize(
    ("record", "holds"),
    [
        (lambda ledger: None, "something unknown"),
        (lambda ledger: ledger.record_attention([5]), "attention rows"),
        (lambda ledger: ledger.record_checkpoint(5, 24), "the checkpoint of position 24"),
        (lambda ledger: (ledger.record_checkpoint(5, 48), ledger.forget([5])), "something unknown"),
        (lambda ledger: (ledger.record_checkpoint(5, 48), ledger.record_attention([5])), "attention rows"),
    ],
    ids=["never written", "attention", "another position", "changed hands", "handed to attention"],
)
def test_any_other_page_is_refused_with_what_it_holds(ledger, record, holds):
    record(ledger)
    with pytest.raises(
        StateError, match=f"request a starts at position 48 from block 5, whose page holds {holds}: restoring it"
    ):
        ledger.check_restorable("a", 5, 48)


def test_the_null_block_is_refused_as_a_checkpoint(ledger):
    with pytest.raises(
        StateError, match=r"the checkpoint of request a at position 48 is the null block \(id 0\), whose page is shared"
    ):
        ledger.check_restorable("a", 0, 48)


@pytest.mark.parametrize("block", [-1, 10, 11])
def test_a_block_outside_the_pool_is_refused(ledger, block):
    with pytest.raises(
        StateError,
        match=rf"the checkpoint of request a at position 48 is block {block}, but the pool has blocks 1 to 9$",
    ):
        ledger.check_restorable("a", block, 48)


@pytest.mark.parametrize(("block", "message"), [(0, "an attention block is the null block"), (10, "is block 10, but")])
def test_the_null_block_and_foreign_ids_never_become_attention(ledger, block, message):
    with pytest.raises(StateError, match=message):
        ledger.record_attention([block])
    assert ledger.counts() == (0, 0)


@pytest.mark.parametrize("block", [1, 9])
def test_the_first_and_the_last_block_of_the_pool_are_accepted(ledger, block):
    ledger.check_block(block, "a block")


def test_a_checkpoint_never_goes_over_attention_rows(ledger):
    ledger.record_attention([5])
    with pytest.raises(StateError, match=r"request a at position 48 would go into block 5, whose page holds attention"):
        ledger.check_writable("a", [4, 5, 6], 48)


def test_two_groups_never_share_the_block_of_a_checkpoint(ledger):
    with pytest.raises(StateError, match=r"request a at position 48 .* blocks are \[4, 5, 4\]"):
        ledger.check_writable("a", [4, 5, 4], 48)


def test_an_unknown_page_and_an_older_checkpoint_may_be_overwritten(ledger):
    ledger.record_checkpoint(4, 24)
    ledger.check_writable("a", [4, 5, 6], 48)
