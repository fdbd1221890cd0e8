"""Time two ways of doing the same, in turns, so that a machine that slows down slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def in_turns(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of one call of each, after one call of each that is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for action, seconds in zip((first, second), times, strict=True):
            began = time.perf_counter()
            action()
            if round_:
                seconds.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])
