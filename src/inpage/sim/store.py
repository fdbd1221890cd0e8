"""Slots and pages with symbols in them: the `Store` of the real `Mover`, and what attention does to pages.

A slot holds one state per GDN group. A page holds one whole number that says what is in it:

| number                     | the page holds                                                         |
|----------------------------|------------------------------------------------------------------------|
| `UNKNOWN`                  | bytes of nobody, as after start                                        |
| `POISON`                   | attention rows over bytes that had not been zeroed: its readers get NaN |
| 0                          | zeros                                                                  |
| above 0                    | attention rows; the number is the writer's fold after the last of them |
| below 0, other             | a checkpoint: group and state, see `state_mark`                        |
"""

from __future__ import annotations

from collections.abc import Sequence

from inpage.sim.folds import GROUP_STARTS, MODULUS
from inpage.state.ledger import NULL_BLOCK

ZEROS = 0
UNKNOWN = -(1 << 80)
POISON = -(1 << 81)
GARBAGE = MODULUS + 1
"""A state that no fold ever is: what a slot or a page of the wrong kind gives."""

_KINDS = len(GROUP_STARTS)


class NullBlockWritten(AssertionError):  # noqa: N818 (said as it happened)
    """The null block's page, which all requests share, was written."""


def state_mark(group: int, state: int) -> int:
    """The number of a page that holds this state of this GDN group."""
    return -(state * _KINDS + group) - 1


def marked_state(mark: int, group: int) -> int:
    """The state that GDN group `group` reads from a page; `GARBAGE` unless it is a checkpoint of that group."""
    if UNKNOWN < mark < 0:
        state, owner = divmod(-mark - 1, _KINDS)
        if owner == group:
            return state
    return GARBAGE


class SymbolStore:
    """Slots 1 to `slots`, and the pages of `num_blocks` blocks."""

    def __init__(self, num_blocks: int, slots: int, groups: int) -> None:
        self.groups = groups
        self.slots = [[GARBAGE] * groups for _ in range(slots + 1)]
        self.pages = [UNKNOWN] * num_blocks
        self.rows: dict[int, dict[int, int]] = {}
        """Of attention pages, the fold at each mark inside the block: what a reader of fewer rows finds."""

    def save(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy the slot into the pages of `blocks`, one per GDN group; returns the states copied."""
        for group, block in enumerate(blocks):
            self.write(block, state_mark(group, self.slots[slot][group]))
        return len(blocks)

    def restore(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy the pages of `blocks` into the slot; returns the states copied."""
        self.slots[slot] = [marked_state(self.pages[block], group) for group, block in enumerate(blocks)]
        return len(blocks)

    def zero_slot(self, slot: int) -> None:
        """Make the slot an empty state."""
        self.slots[slot] = list(GROUP_STARTS[: self.groups])

    def zero_pages(self, blocks: Sequence[int]) -> None:
        """Zero the pages of these blocks."""
        for block in blocks:
            self.write(block, ZEROS)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> int:
        """Copy pages, source to target; returns how many."""
        for source, target in copies:
            self.write(target, self.pages[source])
            if source in self.rows:
                self.rows[target] = dict(self.rows[source])
        return len(copies)

    def cut(self, block: int, position: int, fold: int) -> None:
        """A request goes on at `position` in this page: rows behind it are not its own, and count for nothing."""
        if self.rows.get(block, {}).get(position) == fold:
            self.pages[block] = fold

    def fold_at(self, block: int, position: int) -> int:
        """What a reader of the page's rows up to `position` finds."""
        return self.rows.get(block, {}).get(position, self.pages[block])

    def write(self, block: int, mark: int) -> None:
        """Put `mark` into the page."""
        if block == NULL_BLOCK:
            raise NullBlockWritten(f"the null block was written: its page would hold {describe(mark)}")
        self.rows.pop(block, None)
        self.pages[block] = mark


def describe(mark: int) -> str:
    """A page's content in words."""
    if mark == UNKNOWN:
        return "bytes of nobody"
    if mark == POISON:
        return "attention rows over bytes that were not zeroed"
    if mark == ZEROS:
        return "zeros"
    if mark > 0:
        return f"attention rows up to the fold {mark}"
    state, group = divmod(-mark - 1, _KINDS)
    return f"a checkpoint of GDN group {group} with the state {state}"
