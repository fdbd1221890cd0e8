"""The one order that is right, and every refusal before a byte moves."""

from collections.abc import Sequence

import pytest
from state_toy import GROUPS

from inpage.errors import StateError
from inpage.state.ledger import Attention, Checkpoint, Ledger
from inpage.state.mover import Mover
from inpage.state.plan import Run, Start, StepFacts
from inpage.state.slots import SlotTable

B = 24


class RecordingStore:
    """A store that only writes down what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def save(self, slot: int, blocks: Sequence[int]) -> int:
        self.calls.append(("save", slot, *blocks))
        return 100

    def restore(self, slot: int, blocks: Sequence[int]) -> int:
        self.calls.append(("restore", slot, *blocks))
        return 100

    def zero_slot(self, slot: int) -> None:
        self.calls.append(("zero slot", slot))

    def zero_pages(self, blocks: Sequence[int]) -> None:
        self.calls.append(("zero pages", *blocks))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> int:
        self.calls.append(("copy pages", *copies))
        return 100


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore()


@pytest.fixture
def mover(store) -> Mover:
    return Mover(B, SlotTable(range(1, 4)), Ledger(num_blocks=20), store)


def tables(*columns: int) -> list[list[int]]:
    """Block tables of all groups: `tables(0, 4)` has the blocks 4, 5, 6 at index 1 and null at index 0."""
    return [[block and block + group for block in columns] for group in range(GROUPS)]


def cold(mover: Mover, request: str, tokens: int, *columns: int) -> None:
    """A cold start that runs up to `tokens`."""
    mover.before_forward(StepFacts(starts=[Start(request, 0, tables(*columns))]))
    mover.after_forward([Run(request, 0, tokens, tables(*columns))])


def test_a_cold_request_gets_an_empty_slot_and_is_saved_on_the_boundary(mover, store):
    cold(mover, "a", B, 4)
    assert store.calls == [("zero slot", 1), ("save", 1, 4, 5, 6)]
    assert [mover.ledger.content(block) for block in (4, 5, 6, 7)] == [Checkpoint(B)] * 3 + [None]
    assert mover.slots.of("a").position == B


def test_a_hit_is_restored_into_a_slot_that_is_not_zeroed_first(mover, store):
    cold(mover, "a", B, 4)
    mover.before_forward(StepFacts(finished={"a"}, starts=[Start("b", B, tables(4, 7))]))
    assert store.calls[2:] == [("restore", 1, 4, 5, 6)]
    assert mover.slots.of("b").position == B


def test_slots_are_handed_back_before_they_are_given_and_pages_zeroed_before_a_restore(mover, store):
    for request, column in zip("abc", (4, 7, 10), strict=True):
        cold(mover, request, B, column)
    store.calls.clear()
    facts = StepFacts(
        finished={"b"}, preempted={"a"}, starts=[Start("d", B, tables(10, 13))], new_attention_blocks=[16, 17]
    )
    mover.before_forward(facts)
    assert store.calls == [("zero pages", 16, 17), ("restore", 2, 10, 11, 12)]
    assert mover.slots.held == {"c": 3, "d": 2}
    assert mover.slots.free == (1,)
    assert mover.ledger.content(16) == Attention()


def test_a_resumed_request_hands_its_old_slot_back_and_starts_again_in_one_step(mover, store):
    cold(mover, "a", B, 4)
    mover.before_forward(StepFacts(resumed={"a"}, starts=[Start("a", B, tables(4, 7))]))
    assert store.calls[-1] == ("restore", 1, 4, 5, 6)
    mover.check_integrity()


def test_new_blocks_of_running_and_starting_requests_are_forgotten_by_the_ledger(mover):
    cold(mover, "a", B, 4)
    mover.before_forward(StepFacts(finished={"a"}, starts=[Start("b", 0, tables(4))], new_state_blocks=[5]))
    assert [mover.ledger.content(block) for block in (4, 5, 6)] == [None] * 3


def test_a_run_inside_a_block_advances_the_slot_and_saves_nothing(mover, store):
    cold(mover, "a", B - 1, 4)
    assert store.calls == [("zero slot", 1)]
    mover.after_forward([Run("a", B - 1, 1, tables(4))])
    assert store.calls[-1] == ("save", 1, 4, 5, 6)
    assert mover.slots.of("a").position == B


def test_the_slots_of_a_batch_come_in_its_order(mover):
    for request in "abc":
        cold(mover, request, 1, 4)
    assert mover.slots_of(["c", "a", "b"]) == [3, 1, 2]


def test_the_counters_add_up(mover):
    cold(mover, "a", B, 4)
    mover.before_forward(StepFacts(finished={"a"}, starts=[Start("b", B, tables(4, 7))], new_attention_blocks=[16, 17]))
    counters = mover.counters
    assert (counters.saves, counters.restores, counters.fresh) == (1, 1, 1)
    assert (counters.hand_backs, counters.zeroed_pages, counters.bytes) == (1, 2, 200)
    assert counters.seconds > 0
    assert counters.line().startswith(
        "saves 1, restores 1, fresh slots 1, hand-backs 1, zeroed pages 2, copied blocks 0, copied 0.0 MiB"
    )


# ------------------------------------------------------------------------------- refusals before
def refuse(mover: Mover, facts: StepFacts, message: str) -> None:
    with pytest.raises(StateError, match=message):
        mover.before_forward(facts)


def test_a_start_off_a_boundary_is_refused_before_anything_moves(mover, store):
    cold(mover, "a", B, 4)
    store.calls.clear()
    facts = StepFacts(finished={"a"}, starts=[Start("b", B + 17, tables(4, 7))], new_attention_blocks=[16])
    refuse(mover, facts, f"request b starts at position {B + 17}, 17 tokens past the boundary {B}")
    assert store.calls == []
    assert mover.slots.held == {"a": 1}


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_foreign_page_in_any_group_is_refused_and_no_slot_is_given(mover, store, group):
    cold(mover, "a", B, 4)
    store.calls.clear()
    foreign = tables(4, 7)
    foreign[group][0] = 19
    refuse(
        mover,
        StepFacts(starts=[Start("b", B, foreign)]),
        f"request b starts at position {B} from block 19, whose page holds something unknown",
    )
    assert store.calls == []
    assert not mover.slots.holds("b")


def test_a_checkpoint_of_another_position_is_refused(mover):
    cold(mover, "a", B, 4)
    refuse(
        mover,
        StepFacts(starts=[Start("b", 2 * B, tables(0, 4))]),
        f"request b starts at position {2 * B} from block 4, whose page holds the checkpoint of position {B}:",
    )


def test_a_page_that_attention_took_in_this_very_step_is_refused(mover):
    cold(mover, "a", B, 4)
    refuse(
        mover,
        StepFacts(starts=[Start("b", B, tables(4, 7))], new_attention_blocks=[5]),
        f"request b starts at position {B} from block 5, whose page holds attention rows",
    )


def test_a_hit_on_the_null_block_is_refused(mover):
    refuse(
        mover,
        StepFacts(starts=[Start("b", B, tables(0, 7))]),
        rf"the checkpoint of request b at position {B} is the null block \(id 0\)",
    )


def test_the_null_block_is_never_zeroed_as_an_attention_page(mover, store):
    refuse(mover, StepFacts(new_attention_blocks=[0]), r"an attention block is the null block \(id 0\)")
    assert store.calls == []


def test_a_second_start_without_a_hand_back_is_refused_and_the_slot_keeps_its_state(mover, store):
    cold(mover, "a", B, 4)
    store.calls.clear()
    refuse(
        mover,
        StepFacts(starts=[Start("a", B, tables(4, 7))]),
        f"request a starts at position {B} while it still holds slot 1 at position {B}",
    )
    assert store.calls == []


def test_more_starts_than_slots_are_refused(mover):
    for request in "abc":
        cold(mover, request, 1, 4)
    refuse(mover, StepFacts(starts=[Start("d", 0, tables(7))]), "no slot for request d at position 0: all 3 are held")


# -------------------------------------------------------------------------------- refusals after
def test_a_run_that_does_not_continue_where_the_slot_ends_is_refused_before_the_save(mover, store):
    cold(mover, "a", 5, 4)
    with pytest.raises(
        StateError,
        match=r"request a computed tokens from position 6, but the state in its slot 1 covers 5 tokens",
    ):
        mover.after_forward([Run("a", 6, B - 6, tables(4))])
    assert store.calls == [("zero slot", 1)]


def test_a_run_without_a_slot_is_refused(mover):
    with pytest.raises(StateError, match=r"request b is scheduled but holds no slot"):
        mover.after_forward([Run("b", 0, 5, tables(4))])


def test_a_batch_with_a_request_without_a_slot_is_refused(mover):
    with pytest.raises(StateError, match=r"request b is scheduled but holds no slot"):
        mover.slots_of(["b"])


@pytest.mark.parametrize(
    ("block", "message"),
    [(0, r"is the null block \(id 0\)"), (20, "is block 20, but the pool has blocks 1 to 19")],
    ids=["the null block", "outside the pool"],
)
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_save_into_a_block_that_is_nobodys_is_refused_before_any_copy(mover, store, group, block, message):
    mover.before_forward(StepFacts(starts=[Start("a", 0, tables(4))]))
    wrong = tables(4)
    wrong[group][0] = block
    with pytest.raises(StateError, match=f"the checkpoint of request a at position {B} {message}"):
        mover.after_forward([Run("a", 0, B, wrong)])
    assert store.calls == [("zero slot", 1)]
    assert mover.ledger.counts() == (0, 0)


def test_a_run_over_a_boundary_is_refused_before_the_slot_advances(mover):
    mover.before_forward(StepFacts(starts=[Start("a", 0, tables(4, 7))]))
    with pytest.raises(StateError, match=rf"request a computes tokens \[0, {B + 5}\) in one step"):
        mover.after_forward([Run("a", 0, B + 5, tables(4, 7))])
    assert mover.slots.of("a").position == 0


# marks of 8 tokens in blocks of 24
@pytest.fixture
def marked(store) -> Mover:
    return Mover(B, SlotTable(range(1, 4)), Ledger(num_blocks=20), store, mark_tokens=8)


def test_blocks_are_copied_after_zeroing_and_before_the_state_is_restored_from_them(marked, store):
    marked.before_forward(StepFacts(starts=[Start("a", 0, tables(4))], new_attention_blocks=[1]))
    marked.after_forward([Run("a", 0, 16, tables(4), prompt_tokens=20)])
    store.calls.clear()
    copies = [(1, 2), *((4 + group, 10 + group) for group in range(GROUPS))]
    facts = StepFacts(starts=[Start("b", 16, tables(10))], new_attention_blocks=[2], copies=copies)
    marked.before_forward(facts)
    assert store.calls == [
        ("zero pages", 2),
        ("copy pages", *copies),
        ("restore", marked.slots.of("b").index, *(10 + group for group in range(GROUPS))),
    ]
    assert marked.ledger.content(2) == Attention()
    assert marked.ledger.content(10) == Checkpoint(16)
    assert marked.counters.block_copies == 1 + GROUPS


def test_a_running_request_goes_on_in_its_block_after_its_mark_was_copied_away(marked, store):
    marked.before_forward(StepFacts(starts=[Start("a", 0, tables(4))]))
    marked.after_forward([Run("a", 0, 16, tables(4), prompt_tokens=20)])
    marked.before_forward(StepFacts(copies=[(4 + group, 10 + group) for group in range(GROUPS)]))
    marked.after_forward([Run("a", 16, 8, tables(4), prompt_tokens=20)])
    assert marked.ledger.content(4) == Checkpoint(B)
    assert marked.ledger.content(10) == Checkpoint(16)


def test_a_copy_of_an_unknown_page_is_refused_before_anything_is_copied(marked, store):
    refuse(marked, StepFacts(copies=[(4, 10)]), "block 10 would become a copy of block 4, whose page holds something")
    refuse(marked, StepFacts(copies=[(0, 10)]), r"the source of a copy into block 10 is the null block \(id 0\)")
    assert store.calls == []


def test_a_start_from_a_copy_of_another_position_is_refused(marked, store):
    marked.before_forward(StepFacts(starts=[Start("a", 0, tables(4))]))
    marked.after_forward([Run("a", 0, 8, tables(4), prompt_tokens=20)])
    copies = [(4 + group, 10 + group) for group in range(GROUPS)]
    with pytest.raises(StateError, match="whose page holds the checkpoint of position 8"):
        marked.before_forward(StepFacts(starts=[Start("b", 16, tables(10))], copies=copies))
    assert not any(call[0] == "restore" for call in store.calls)
