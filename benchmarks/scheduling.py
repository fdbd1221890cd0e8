"""What the scheduler side costs: vLLM's real scheduler through the same requests, with it and without."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.timing import in_turns
from inpage.demo.model import make_model

REQUESTS, ROUNDS = 24, 5


def rows() -> Iterator[tuple[str, ...]]:
    """Seconds for the same requests."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engines"))
    from scheduler_double import make_scheduler, request, run_to_end

    from inpage.engines.scheduler import SchedulerSide

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))

        def serve(with_side: bool) -> None:
            rng = random.Random(0)
            scheduler = make_scheduler(model, num_blocks=200, budget=24)
            if with_side:
                SchedulerSide(scheduler)
            for index in range(REQUESTS):
                tokens = [rng.randrange(4) for _ in range(rng.randrange(20, 300))]
                scheduler.add_request(request(str(index), tokens, output=40))
            run_to_end(scheduler, steps=5000)

        mine, theirs = in_turns(lambda: serve(True), lambda: serve(False), ROUNDS)
    yield (
        f"vLLM's scheduler, {REQUESTS} requests",
        f"{mine:.3f} s with the scheduler side",
        f"{theirs:.3f} s without",
        f"{theirs / mine:.2f}",
        "at least 0.90",
    )
