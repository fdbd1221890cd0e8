"""How fast the simulator is: steps of the real scheduler with every check, on one core."""

from __future__ import annotations

import time
from collections.abc import Iterator

SEEDS, STEPS, ROUNDS = range(1, 7), 1000, 6


def rows() -> Iterator[tuple[str, ...]]:
    """Steps per second of one core's time: the same seeds several times, the best, as others only ever slow it down."""
    from inpage.sim.run import run_seed

    run_seed(1, 50)
    rates = []
    for _ in range(ROUNDS):
        began = time.process_time()
        steps = sum(run_seed(seed, STEPS).figures["steps"] for seed in SEEDS)
        rates.append(steps / (time.process_time() - began))
    yield (
        f"simulator, {len(SEEDS)} seeds, best of {ROUNDS} (slowest {min(rates):,.0f})",
        f"{max(rates):,.0f} checked steps/s",
        "one core",
        f"{max(rates) / 2500:.2f} of 2,500",
        "at least 1",
    )
