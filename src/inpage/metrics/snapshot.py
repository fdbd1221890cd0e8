"""Snapshots: the counters of one process as plain integers, by field (`catalogue.Metric.fields`).

Seconds are counted in whole microseconds, so that a snapshot is integers only.
"""

from __future__ import annotations

from inpage.metrics.catalogue import COUNTER_FIELDS
from inpage.state.mover import Mover

Snapshot = dict[str, int]


def of_worker(mover: Mover) -> Snapshot:
    """Totals and levels of one worker; proportional to the pages in use, so not for every step."""
    counters = mover.counters
    attention, checkpoints = mover.ledger.counts()
    return {
        "saves": counters.saves,
        "restores": counters.restores,
        "fresh": counters.fresh,
        "hand_backs": counters.hand_backs,
        "zeroed_pages": counters.zeroed_pages,
        "block_copies": counters.block_copies,
        "bytes": counters.bytes,
        "copy_us": round(counters.seconds * 1e6),
        "step_us": round(counters.step_seconds * 1e6),
        "slots_held": len(mover.slots.held),
        "slots": mover.slots.count,
        "pages_attention": attention,
        "pages_checkpoint": checkpoints,
        # Block 0 is vLLM's null block and belongs to nobody.
        "pages_none": mover.ledger.num_blocks - 1 - attention - checkpoints,
    }


class Changes:
    """Turns snapshots of totals into what has been added since the last one; levels stay as they are.

    Additions can be handed to any one of several API servers, totals could not: vLLM sends an engine's statistics to
    whichever of them has a request in the step.
    """

    def __init__(self) -> None:
        self._sent: Snapshot = {}

    def since_last(self, snapshot: Snapshot) -> Snapshot:
        """Mutates: the snapshot counts as sent. A total that has fallen began again from 0 (the pool was rebuilt)."""
        added = {field: self._added(field, value) for field, value in snapshot.items()}
        self._sent = snapshot
        return added

    def _added(self, field: str, value: int) -> int:
        if field not in COUNTER_FIELDS:
            return value
        sent = self._sent.get(field, 0)
        return value - sent if value >= sent else value
