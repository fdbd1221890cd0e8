"""Carries out the plan of each step on slots, pages and ledger, in the one order that is right.

    hand back slots -> zero new attention blocks -> copy blocks -> give slots -> (forward) -> save

Every check comes before the bytes move: a step that must not be served raises `StateError` and copies
nothing of the move in question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, Protocol

from inpage.errors import StateError
from inpage.state.counters import Counters
from inpage.state.grid import Grid
from inpage.state.ledger import Ledger
from inpage.state.plan import Run, StepFacts, plan_after, plan_before
from inpage.state.slots import SlotTable

P = ParamSpec("P")


class Store(Protocol):
    """Where the bytes are; `pages.PageStore` on an engine, symbols in the simulator."""

    def save(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy the slot into the pages of `blocks`, one per GDN group; returns the bytes copied."""

    def restore(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy the pages of `blocks` into the slot; returns the bytes copied."""

    def zero_slot(self, slot: int) -> None:
        """Make the slot an empty state."""

    def zero_pages(self, blocks: Sequence[int]) -> None:
        """Zero the pages of these blocks in every attention layer."""

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> int:
        """Copy whole pages in every attention layer, source to target; returns the bytes copied."""


class Mover:
    """The state side of one worker."""

    def __init__(
        self, block_tokens: int, slots: SlotTable, ledger: Ledger, store: Store, mark_tokens: int | None = None
    ) -> None:
        self.grid = Grid(block_tokens, mark_tokens or block_tokens)
        self.slots = slots
        self.ledger = ledger
        self.store = store
        self.counters = Counters()

    def before_forward(self, facts: StepFacts) -> None:
        """Bring slots and pages to where the forward pass may start."""
        moves = plan_before(facts, self.grid)
        self.counters.hand_backs += len(self.slots.hand_back(moves.hand_back))
        if moves.zero:
            self.ledger.record_attention(moves.zero)
            self.store.zero_pages(moves.zero)
            self.counters.zeroed_pages += len(moves.zero)
        self.ledger.forget(moves.forget)
        if moves.copy:
            self.ledger.record_copies(moves.copy)
            self._count(self.store.copy_pages, moves.copy)
            self.counters.block_copies += len(moves.copy)
        for give in moves.give:
            for block in give.checkpoint or ():
                self.ledger.check_restorable(give.request, block, give.position)
            slot = self.slots.give(give.request, give.position)
            if give.checkpoint is None:
                self.store.zero_slot(slot)
                self.counters.fresh += 1
            else:
                self._count(self.store.restore, slot, give.checkpoint)
                self.counters.restores += 1

    def after_forward(self, runs: Sequence[Run]) -> None:
        """Advance the slots of the runs and save where a run ended on a boundary."""
        saves = plan_after(runs, self.grid)
        for run in runs:
            slot = self.slots.of(run.request)
            if slot.position != run.position:
                raise StateError(
                    f"request {run.request} computed tokens from position {run.position}, but the state in its slot "
                    f"{slot.index} covers {slot.position} tokens"
                )
            slot.position += run.tokens
        for save in saves:
            self.ledger.check_writable(save.request, save.checkpoint, save.position)
            self._count(self.store.save, self.slots.of(save.request).index, save.checkpoint)
            for block in save.checkpoint:
                self.ledger.record_checkpoint(block, save.position)
            self.counters.saves += 1

    def _count(self, copy: Callable[P, int], *args: P.args, **kwargs: P.kwargs) -> None:
        began = time.perf_counter()
        self.counters.bytes += copy(*args, **kwargs)
        self.counters.seconds += time.perf_counter() - began

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.grid.block_tokens

    def slots_of(self, requests: Iterable[str]) -> list[int]:
        """The slots of the requests of a batch, in its order."""
        return [self.slots.of(request).index for request in requests]

    def check_integrity(self) -> None:
        """Nothing is lost: see `SlotTable.check_integrity`."""
        self.slots.check_integrity()
