"""Snapshots and what is added between them."""

from __future__ import annotations

from types import SimpleNamespace

from inpage.metrics.catalogue import COUNTER_FIELDS, METRICS
from inpage.metrics.snapshot import Changes, of_worker
from inpage.state.ledger import Ledger
from inpage.state.mover import Mover
from inpage.state.plan import Run, Start, StepFacts
from inpage.state.slots import SlotTable

SCHEDULER_FIELDS = {
    "refused_unwritten",
    "deferred",
    "below_block",
    "cut",
    "attention_only_tokens",
    "evicted_before_hit",
    "evicted_after_hit",
}


def mover() -> Mover:
    """Blocks of 16 tokens, three slots, nine blocks beside the null block; every copy is 100 bytes."""
    store = SimpleNamespace(
        save=lambda slot, blocks: 100,
        restore=lambda slot, blocks: 100,
        zero_slot=lambda slot: None,
        zero_pages=lambda blocks: None,
    )
    return Mover(16, SlotTable(range(1, 4)), Ledger(10), store)


def test_a_worker_is_counted_from_a_cold_start_over_a_hit_to_the_hand_back():
    worker = mover()
    assert of_worker(worker) | {"copy_us": 0} == dict.fromkeys(of_worker(worker), 0) | {"slots": 3, "pages_none": 9}
    tables = [[2], [3]]
    worker.before_forward(StepFacts(starts=[Start("a", 0, tables)], new_attention_blocks=[1]))
    worker.after_forward([Run("a", 0, 16, tables)])
    snapshot = of_worker(worker)
    assert (snapshot["saves"], snapshot["fresh"], snapshot["restores"], snapshot["bytes"]) == (1, 1, 0, 100)
    assert (snapshot["slots_held"], snapshot["slots"], snapshot["zeroed_pages"]) == (1, 3, 1)
    assert [snapshot[f"pages_{owner}"] for owner in ("attention", "checkpoint", "none")] == [1, 2, 6]
    worker.before_forward(StepFacts(finished=["a"], starts=[Start("b", 16, [[2, 4], [3, 5]])]))
    worker.before_forward(StepFacts(finished=["b"]))
    snapshot = of_worker(worker)
    assert (snapshot["restores"], snapshot["hand_backs"], snapshot["slots_held"]) == (1, 2, 0)
    assert snapshot["bytes"] == 200


def test_every_metric_has_a_field_and_every_field_a_metric():
    fields = [field for metric in METRICS for field in metric.fields.values()]
    assert len(set(fields)) == len(fields)
    assert set(fields) == set(of_worker(mover())) | SCHEDULER_FIELDS
    assert {"slots_held", "slots", "pages_none"}.isdisjoint(COUNTER_FIELDS)
    for metric in METRICS:
        assert metric.name.startswith("inpage_")
        assert not metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert (metric.label is None) == (set(metric.fields) == {""})


def test_changes_are_additions_for_counters_and_levels_for_gauges():
    changes = Changes()
    assert changes.since_last({"saves": 5, "slots_held": 2}) == {"saves": 5, "slots_held": 2}
    assert changes.since_last({"saves": 7, "slots_held": 2}) == {"saves": 2, "slots_held": 2}
    assert changes.since_last({"saves": 7, "slots_held": 0}) == {"saves": 0, "slots_held": 0}


def test_a_total_that_began_again_is_all_new():
    """After sleep and wake on Gaudi the worker's pool and its counters are new; Prometheus' counters go on."""
    changes = Changes()
    changes.since_last({"saves": 5, "slots_held": 2})
    assert changes.since_last({"saves": 2, "slots_held": 0}) == {"saves": 2, "slots_held": 0}
