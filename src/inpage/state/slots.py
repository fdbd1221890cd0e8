"""Slots: where the states of running requests live (rule 1).

A slot is an index into the slot tensors of every GDN layer. A request holds one slot from the step in
which it starts until its hand-back; the table also remembers up to which position the state in the slot
has come, so that a step which does not continue there is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inpage.errors import ConfigError, StateError


@dataclass
class HeldSlot:
    """A slot and the number of tokens that its state covers."""

    index: int
    position: int


class SlotTable:
    """Which request holds which slot.

    The free list must evolve alike on every tensor-parallel rank, whatever the order in which a rank
    iterates its sets: hand-backs are sorted, gives follow the scheduler's order.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        """`indices` are the usable slots, each once; the first to be given is the lowest."""
        self._indices = tuple(sorted(indices))
        if len(set(self._indices)) != len(self._indices):
            raise ConfigError(f"the slots {list(self._indices)} are not all different")
        self._free = list(reversed(self._indices))
        self._held: dict[str, HeldSlot] = {}

    # queries
    @property
    def count(self) -> int:
        """All slots, free and held."""
        return len(self._indices)

    @property
    def free(self) -> tuple[int, ...]:
        """The free slots, in the order in which they will not be given: the last one is next."""
        return tuple(self._free)

    @property
    def held(self) -> dict[str, int]:
        """Slot by request, for the requests that hold one."""
        return {request: slot.index for request, slot in self._held.items()}

    def holds(self, request: str) -> bool:
        """Whether the request holds a slot."""
        return request in self._held

    def of(self, request: str) -> HeldSlot:
        """The request's slot; raises `StateError` when it holds none."""
        slot = self._held.get(request)
        if slot is None:
            raise StateError(
                f"request {request} is scheduled but holds no slot: it never started, or its slot was "
                f"handed back while it ran ({len(self._held)} of {self.count} slots are held)"
            )
        return slot

    def check_integrity(self) -> None:
        """Free and held slots together are all slots, each once; raises `StateError` otherwise."""
        together = sorted([*self._free, *(slot.index for slot in self._held.values())])
        if together != list(self._indices):
            raise StateError(f"slots lost or doubled: free {self._free}, held {self.held}, all {self._indices}")

    # mutations
    def give(self, request: str, position: int) -> int:
        """Give the request a free slot whose state will cover `position` tokens; returns the slot."""
        if request in self._held:
            raise StateError(
                f"request {request} starts at position {position} while it still holds slot "
                f"{self._held[request].index} at position {self._held[request].position}: a hand-back was missed"
            )
        if not self._free:
            raise StateError(
                f"no slot for request {request} at position {position}: all {self.count} are held by "
                f"{', '.join(self._held)}; preempted or finished requests did not hand theirs back"
            )
        index = self._free.pop()
        self._held[request] = HeldSlot(index, position)
        return index

    def hand_back(self, requests: Iterable[str]) -> list[str]:
        """Take back the slots of those requests that hold one, in sorted order; returns these requests."""
        holders = sorted(request for request in set(requests) if request in self._held)
        for request in holders:
            self._free.append(self._held.pop(request).index)
        return holders
