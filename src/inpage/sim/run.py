"""One seed from start to rest, and what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from inpage.errors import StateError
from inpage.sim import engine
from inpage.sim.knobs import Knobs, draw, pinned
from inpage.sim.oracle import OracleMismatch
from inpage.sim.result import Failure, SeedResult
from inpage.sim.store import NullBlockWritten
from inpage.sim.workload import Workload
from inpage.sim.world import World

STEPS = 3000
"""Steps of a seed unless asked otherwise."""

Break = Callable[[World], AbstractContextManager[Any]]
"""A mutant: breaks a rule of this world while the context is open."""


def knobs_of(seed: int, pins: Mapping[str, str] | None = None) -> Knobs:
    """The knobs of a seed on the vLLM that is installed, with pinned values."""
    return pinned(draw(seed, small_budgets=engine.SMALL_BUDGETS), pins or {})


def run_seed(
    seed: int, steps: int = STEPS, pins: Mapping[str, str] | None = None, broken: Break | None = None
) -> SeedResult:
    """Run one seed; never raises for what the run finds."""
    knobs = knobs_of(seed, pins)
    result = SeedResult(seed, knobs)
    world = World(knobs)
    began = time.process_time()
    try:
        with broken(world) if broken else nullcontext():
            Workload(world, seed).run(steps)
    except OracleMismatch as mismatch:
        result.failure = Failure(mismatch.check, str(mismatch), world.tally.steps, mismatch.request, mismatch.block)
    except NullBlockWritten as written:
        result.failure = Failure("null block", str(written), world.tally.steps)
    except StateError as error:
        result.failure = Failure("refusal", str(error), world.tally.steps)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__} in {place.name}, line {place.lineno}: {error}"
        result.failure = Failure("exception", message, world.tally.steps)
    result.seconds = time.process_time() - began
    counters = world.worker.mover.counters
    result.figures = asdict(world.tally) | {
        "checks": world.worker.checks,
        "saves": counters.saves,
        "restores": counters.restores,
        "hand_backs": counters.hand_backs,
        "zeroed_pages": counters.zeroed_pages,
        "refused_unwritten": world.side.counters.refused_unwritten,
        "deferred": world.side.counters.deferred,
        "cut": world.side.counters.cut,
    }
    return result
