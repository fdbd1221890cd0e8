"""What the mechanism costs a decode step, beside the copies: plan, slots and ledger for eight requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.timing import in_turns
from inpage.state.ledger import Ledger
from inpage.state.mover import Mover
from inpage.state.plan import Run, Start, StepFacts
from inpage.state.slots import SlotTable

REQUESTS, BLOCK, STEPS, ROUNDS = 8, 896, 2000, 7


class NoStore:
    """A store without bytes."""

    def save(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy nothing."""
        return 0

    restore = save

    def zero_slot(self, slot: int) -> None:
        """Zero nothing."""

    def zero_pages(self, blocks: Sequence[int]) -> None:
        """Zero nothing."""


def rows() -> Iterator[tuple[str, ...]]:
    """Microseconds a step, against an empty loop over the same requests."""
    tables = [[100 + group] * 400 for group in range(3)]

    def decode() -> None:
        mover = Mover(BLOCK, SlotTable(range(1, REQUESTS + 1)), Ledger(1000), NoStore())
        names = [f"request-{index}" for index in range(REQUESTS)]
        mover.before_forward(StepFacts(starts=[Start(name, 0, tables) for name in names]))
        for step in range(STEPS):
            mover.before_forward(StepFacts())
            mover.after_forward([Run(name, step, 1, tables) for name in names])

    def nothing() -> None:
        names = [f"request-{index}" for index in range(REQUESTS)]
        for step in range(STEPS):
            [(name, step, 1, tables) for name in names]

    mine, theirs = in_turns(decode, nothing, ROUNDS)
    yield (
        f"plan of a decode step, {REQUESTS} requests",
        f"{mine / STEPS * 1e6:.0f} µs",
        f"building the same tuples {theirs / STEPS * 1e6:.1f} µs",
        f"{mine / theirs:.0f}",
        "far below a step (10 ms)",
    )
