"""What a soak saw, as stored in JSON, and how it is judged. No I/O, no server."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from inpage.soak.workload import STAGES

FLAT_WITHIN = 0.03
"""The last quarter's median memory may be this much above the second quarter's."""
MEMORY_REQUESTS = 2000
"""With fewer requests memory is not judged: caches and allocators are still filling."""

Verdict = Literal["passed", "failed", "not judged"]


class MemorySample(BaseModel):
    """Resident bytes of all processes of the server when so many requests had ended."""

    requests: int
    resident_bytes: int


class Pause(BaseModel):
    """What was found with the load drained: slots in use, and the canaries."""

    requests: int
    slots_in_use: float | None
    reset: bool = False
    """Whether the cache was reset first; the server said that it worked."""
    asked: int = 0
    hits: int = 0
    missed: list[str] = Field(default_factory=list)
    """Canaries that should have hit and did not: their answer proves nothing."""
    wrong: list[str] = Field(default_factory=list)
    """Canaries whose answer was not the recorded one, to the bit."""


class SoakResult(BaseModel):
    """One soak; times in seconds, `metrics` is the growth of the server's counters over the load."""

    requests: int
    concurrency: int
    seed: int
    server_arguments: list[str]
    wall_s: float = 0.0
    finished: int = 0
    tokens: int = 0
    aborted: dict[str, int] = Field(default_factory=dict)
    errors: list[str] = Field(default_factory=list)
    """Requests that failed, and what the server's log says of a dead engine."""
    resets_while_running: int = 0
    preemptions_by_pool: float = 0.0
    """Preemptions in stretches without a reset, which preempts what runs."""
    pauses: list[Pause] = Field(default_factory=list)
    memory: list[MemorySample] = Field(default_factory=list)
    metrics: dict[str, float] = Field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and the figures it was judged by."""

    name: str
    verdict: Verdict
    figures: str


def memory_growth(samples: list[MemorySample], requests: int) -> float | None:
    """Last quarter's median over the second quarter's, less 1; None when a quarter has fewer than three samples."""
    second = [s.resident_bytes for s in samples if requests / 4 <= s.requests < requests / 2]
    last = [s.resident_bytes for s in samples if s.requests >= 3 * requests / 4]
    if len(second) < 3 or len(last) < 3:
        return None
    return statistics.median(last) / statistics.median(second) - 1


def judge(result: SoakResult) -> list[Check]:
    """Every check; a soak passes when none has failed."""

    def check(name: str, holds: bool, figures: str) -> Check:
        return Check(name, "passed" if holds else "failed", figures)

    aborted = sum(result.aborted.values())
    ended = result.finished + aborted
    asked = sum(pause.asked for pause in result.pauses)
    hits = sum(pause.hits for pause in result.pauses)
    missed = sum(len(pause.missed) for pause in result.pauses)
    wrong = [name for pause in result.pauses for name in pause.wrong]
    slots = [pause.slots_in_use for pause in result.pauses]
    given = result.metrics.get("inpage_restores_total", 0.0) + result.metrics.get("inpage_fresh_slots_total", 0.0)
    handed_back = result.metrics.get("inpage_hand_backs_total", 0.0)
    resets = sum(pause.reset for pause in result.pauses)
    stages = ", ".join(f"{stage} {result.aborted.get(stage, 0)}" for stage in STAGES)
    return [
        check(
            "every request ended",
            ended == result.requests and not result.errors,
            f"{result.finished:,} finished, {aborted:,} aborted of {result.requests:,}; {len(result.errors)} errors",
        ),
        check("aborted at every stage", all(result.aborted.get(stage) for stage in STAGES), stages),
        check("the pool was too small at times", result.preemptions_by_pool > 0, _count(result.preemptions_by_pool)),
        check(
            "the cache was reset, idle and running",
            resets > 0 and result.resets_while_running > 0,
            f"{resets} idle, {result.resets_while_running} with requests running",
        ),
        check(
            "0 wrong",
            asked > 0 and hits > 0 and not wrong and not missed,
            f"{asked} canary answers, {hits} of them hits, {len(wrong)} wrong" + (f", {missed} missed" * bool(missed)),
        ),
        check(
            "all slots home",
            bool(slots) and not any(slots) and None not in slots and given > 0 and given == handed_back,
            f"{sum(1 for held in slots if held != 0)} of {len(slots)} pauses with slots in use; "
            f"{given:,.0f} given, {handed_back:,.0f} handed back",
        ),
        _memory(result),
    ]


def _count(preemptions: float) -> str:
    return f"{preemptions:,.0f} preemptions by the pool"


def _memory(result: SoakResult) -> Check:
    name = "memory flat"
    if result.requests < MEMORY_REQUESTS:
        return Check(name, "not judged", f"{result.requests:,} requests; {MEMORY_REQUESTS:,} are needed")
    growth = memory_growth(result.memory, result.requests)
    if growth is None:
        return Check(name, "failed", f"{len(result.memory)} samples are too few to judge")
    return Check(
        name,
        "passed" if growth <= FLAT_WITHIN else "failed",
        f"{growth:+.2%} from the second to the last quarter, {result.memory[-1].resident_bytes / 2**20:,.0f} MiB at "
        f"the end; at most {FLAT_WITHIN:+.0%}",
    )
