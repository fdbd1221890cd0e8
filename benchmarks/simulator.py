"""How fast the simulator is: steps of the real scheduler with every check, on one core."""

from __future__ import annotations

import time
from collections.abc import Iterator

SEEDS, STEPS = range(1, 13), 1000


def rows() -> Iterator[tuple[str, ...]]:
    """Steps per second of one core's time."""
    from inpage.sim.run import run_seed

    run_seed(1, 50)
    began = time.process_time()
    results = [run_seed(seed, STEPS) for seed in SEEDS]
    rate = sum(result.figures["steps"] for result in results) / (time.process_time() - began)
    yield (
        f"simulator, {len(SEEDS)} seeds",
        f"{rate:,.0f} checked steps/s",
        "one core",
        f"{rate / 2500:.2f} of 2,500",
        "at least 1",
    )
