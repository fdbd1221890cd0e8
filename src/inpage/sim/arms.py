"""The arms of the trace study: what each layout makes of a memory budget, and what a replay of it gave.

Arithmetic and figures, no engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.pool import blocks_for
from inpage.sim.costs import Costs

QWEN_27B = Geometry(
    state_bytes=3_207_168, kv_bytes_per_token=4096, block_tokens=896, attention_layers=16, gdn_layers=48
)
"""Qwen3.5-27B and Qwen3.8-27B with bf16 keys and values and float32 states, on one rank."""

KINDS = ("off", "per-block", "bounded", "in-page")


@dataclass(frozen=True)
class Arm:
    """A layout at a memory size. `checkpoints` is K of a bounded pool, None elsewhere."""

    name: str
    memory_bytes: int
    num_blocks: int
    caching: bool = True
    checkpoints: int | None = None

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.name if self.checkpoints is None else "bounded"


@dataclass(frozen=True)
class Server:
    """What is common to the arms; `at_once` sessions run at a time, 0 for all at their recorded times."""

    block_tokens: int
    budget: int
    max_num_seqs: int
    max_model_len: int
    retention_tokens: int | None
    """vLLM's interval; None keeps every checkpoint."""
    at_once: int
    costs: Costs
    mark_tokens: int | None = None
    """vLLM's `prefix_match_unit`."""
    by_value: bool = False
    """Whether what is left behind goes first; else LRU alone, as by default."""


@dataclass
class Figures:
    """One arm's replay. Times in the cost model's seconds; a rate is None when it has no denominator."""

    arm: Arm
    turns: int = 0
    refused: int = 0
    """Turns that do not fit into the pool even alone; their prompts count as sent and not hit."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    """Computed in prefill, again after preemption too."""
    preemptions: int = 0
    evictions: int = 0
    steps: int = 0
    counted_steps: int = 0
    """Decode steps that were counted and not taken."""
    sessions: int = 0
    warm_sessions: int = 0
    """Of several turns, all of which found the turn before, up to a block."""
    wall: float = 0.0
    ttft: list[float] = field(default_factory=list)
    """Of later turns."""
    prefill_a_turn: list[int] = field(default_factory=list)
    """Prompt tokens that each later turn did not find when it started."""

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens of all prompt tokens."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None

    def as_json(self) -> dict[str, Any]:
        """The figures, with the times to first token as mean, median and 90th percentile."""
        plain = asdict(self)
        ttft = sorted(plain.pop("ttft"))
        prefill = sorted(plain.pop("prefill_a_turn"))
        plain["hit_rate"] = self.hit_rate
        plain["later_turn_prefill"] = (
            {"mean": statistics.fmean(prefill), "p50": prefill[len(prefill) // 2]} if prefill else None
        )
        plain["later_turn_ttft"] = (
            {
                "mean": statistics.fmean(ttft),
                "p50": ttft[len(ttft) // 2],
                "p90": ttft[len(ttft) * 9 // 10],
            }
            if ttft
            else None
        )
        return plain


def arms_at(memory_bytes: int, geometry: Geometry, checkpoints: Sequence[int]) -> list[Arm]:
    """All arms that this memory can hold; raises `ConfigError` when it holds none."""
    arms = [
        Arm("off", memory_bytes, blocks_for("off", geometry, memory_bytes), caching=False),
        Arm("per-block", memory_bytes, blocks_for("per-block", geometry, memory_bytes)),
    ]
    for count in checkpoints:
        left = memory_bytes - count * geometry.gdn_layers * geometry.state_bytes
        arms.append(Arm(f"bounded pool, K={count}", memory_bytes, left // geometry.block_bytes, checkpoints=count))
    arms.append(Arm("in-page", memory_bytes, blocks_for("in-page", geometry, memory_bytes)))
    # A block of attention, two in every GDN group, and the null block.
    fitting = [arm for arm in arms if arm.num_blocks > 2 * geometry.gdn_groups + 2]
    if not fitting:
        raise ConfigError(
            f"{memory_bytes:,} bytes hold {arms[-1].num_blocks} blocks of {geometry.block_bytes:,} bytes, too few to "
            "serve anything: give it more memory"
        )
    return fitting
