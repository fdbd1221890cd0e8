"""The shortest reproduction of a failure: fewer steps, then whatever can be switched off without losing it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict

from inpage.sim.knobs import Knobs
from inpage.sim.result import SeedResult

SIMPLER = (
    *(f"{rate}=0" for rate in ("abort_rate", "force_preempt_rate", "busy_reset_rate", "idle_rate", "drain_rate")),
    *("salts=0", "adapters=0", "chunk_limit=0", "reserve_whole_prompt=false", "asynchronous=false", "policy=fcfs"),
    *("retention=none", "max_num_seqs=1", "max_num_seqs=2", "max_num_seqs=3", "sessions=1", "sessions=2", "sessions=3"),
)
"""Pins to try, in this order; a pin stays when the same check fails at least as early."""


def shrink(
    result: SeedResult, pins: Mapping[str, str], again: Callable[[int, Mapping[str, str]], SeedResult]
) -> tuple[int, dict[str, str]]:
    """Steps and pins of the shortest failing run found; `again` repeats the seed with given steps and pins."""
    failure = result.failure
    assert failure is not None
    steps, kept, knobs = failure.step, dict(pins), result.knobs
    for pin in SIMPLER:
        name, _, value = pin.partition("=")
        if name in kept or _is_already(knobs, name, value):
            continue
        trial = again(steps, kept | {name: value})
        if trial.failure is not None and trial.failure.check == failure.check and trial.failure.step <= steps:
            steps, knobs = trial.failure.step, trial.knobs
            kept[name] = value
    return steps, kept


def _is_already(knobs: Knobs, name: str, value: str) -> bool:
    old = asdict(knobs)[name]
    return str(old).lower() == value or (isinstance(old, float) and old == float(value))


def command_line(
    seed: int, steps: int, pins: Mapping[str, str], *, mutant: str | None = None, vllm: str | None = None
) -> str:
    """The command that repeats a run."""
    words = ["inpage", "simulate", "--seeds", "1", "--first-seed", str(seed), "--steps", str(steps)]
    for name, value in pins.items():
        words += ["--set", f"{name}={value}"]
    if mutant:
        words += ["--mutant", mutant]
    if vllm:
        words += ["--vllm", vllm]
    return shlex.join(words)
