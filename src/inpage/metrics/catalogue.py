"""Every metric of inpage on a server's `/metrics`: its name, kind, meaning and where the number comes from.

The docs page and the dashboard are tested against this list. All metrics carry vLLM's own labels `model_name` and
`engine`, so that they join with vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MICRO = 1e-6


@dataclass(frozen=True)
class Metric:
    """One metric.

    `fields` says from which field of a snapshot (`inpage.metrics.snapshot`) each value of the metric's own label
    comes; a metric without a label of its own has the one key "". A field times `unit` is the exposed value.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    fields: Mapping[str, str]
    label: str | None = None
    unit: float = 1.0

    @property
    def exposed_name(self) -> str:
        """The name on `/metrics`: counters end in `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


METRICS = (
    Metric("inpage_saves", "counter", "Checkpoints written into the pages of blocks, one per boundary.", {"": "saves"}),
    Metric(
        "inpage_restores",
        "counter",
        "Requests that started from a checkpoint: hits, and resumes after preemption.",
        {"": "restores"},
    ),
    Metric("inpage_fresh_slots", "counter", "Requests that started cold, from a zeroed slot.", {"": "fresh"}),
    Metric("inpage_hand_backs", "counter", "Slots given back: finish, abort or preemption.", {"": "hand_backs"}),
    Metric(
        "inpage_zeroed_pages",
        "counter",
        "Blocks whose pages were zeroed because attention got them.",
        {"": "zeroed_pages"},
    ),
    Metric(
        "inpage_block_copies",
        "counter",
        "Blocks copied for starts inside a block, and for marks of running requests; none without marks.",
        {"": "block_copies"},
    ),
    Metric(
        "inpage_copied_bytes",
        "counter",
        "Bytes copied by saves, restores and copies of blocks, on rank 0; every rank copies as many.",
        {"": "bytes"},
    ),
    Metric("inpage_copy_seconds", "counter", "Seconds spent in these copies, on rank 0.", {"": "copy_us"}, unit=MICRO),
    Metric(
        "inpage_step_seconds",
        "counter",
        "Seconds of the worker's steps as a whole, on rank 0.",
        {"": "step_us"},
        unit=MICRO,
    ),
    Metric(
        "inpage_refused_hits",
        "counter",
        "Cache matches that were not served, by reason; never_written: no step had filled the block or ever would.",
        {"never_written": "refused_unwritten"},
        label="reason",
    ),
    Metric(
        "inpage_deferred_requests",
        "counter",
        "Times a request waited one step for the blocks that this step fills.",
        {"": "deferred"},
    ),
    Metric(
        "inpage_short_prompts",
        "counter",
        "Requests whose prompt is at most one block: they can never hit.",
        {"": "below_block"},
    ),
    Metric(
        "inpage_evicted_checkpoint_blocks",
        "counter",
        "Blocks of checkpoints that were evicted, before or after a lookup had ended on them; one per GDN group.",
        {"before_hit": "evicted_before_hit", "after_hit": "evicted_after_hit"},
        label="when",
    ),
    Metric(
        "inpage_attention_only_tokens",
        "counter",
        "Tokens of new requests whose attention blocks were found, but no checkpoint: they were computed again.",
        {"": "attention_only_tokens"},
    ),
    Metric(
        "inpage_cut_chunks",
        "counter",
        "Chunks that would have passed a boundary, and end on it.",
        {"": "cut"},
    ),
    Metric("inpage_slots_in_use", "gauge", "Slots held by requests; 0 when the server is idle.", {"": "slots_held"}),
    Metric("inpage_slots", "gauge", "Slots there are: as many as sequences can run (--max-num-seqs).", {"": "slots"}),
    Metric(
        "inpage_pages",
        "gauge",
        "Blocks by what their pages hold: attention rows, a GDN group's checkpoint, or nothing known.",
        {"attention": "pages_attention", "checkpoint": "pages_checkpoint", "none": "pages_none"},
        label="owner",
    ),
)

COUNTER_FIELDS = frozenset(field for metric in METRICS if metric.kind == "counter" for field in metric.fields.values())
