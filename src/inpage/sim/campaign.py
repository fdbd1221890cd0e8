"""Many seeds over several processes. vLLM is imported in these processes only, so that each campaign can
have a vLLM of its own on its import path.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inpage.errors import ConfigError
from inpage.sim.arms import Arm, Figures, Server
from inpage.sim.knobs import Knobs, pinned
from inpage.sim.result import SeedResult
from inpage.sim.traces import read_traces


@dataclass(frozen=True)
class Plan:
    """What to run. `import_path` has another vLLM; `mutant` breaks a rule in every seed."""

    seeds: range
    steps: int
    pins: Mapping[str, str] = field(default_factory=dict)
    mutant: str | None = None
    import_path: Path | None = None
    jobs: int = 1


@dataclass(frozen=True)
class Reproduction:
    """A failing seed and its shortest form."""

    result: SeedResult
    steps: int
    pins: dict[str, str]


class Campaign:
    """The processes that run seeds; a context manager."""

    def __init__(self, jobs: int, import_path: Path | None = None) -> None:
        # Each process is one core's worth of work, and the pool of a spawned process starts without vLLM.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_LOGS", "-torch._library")
        # vLLM walks through sets of names when requests are aborted: with hashes drawn anew in every process, a seed
        # would not be the same run twice.
        os.environ["PYTHONHASHSEED"] = "0"
        self._jobs = jobs
        self._pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(str(import_path) if import_path else None,),
        )

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def version(self) -> str:
        """The version of vLLM that runs; raises `ConfigError` when there is none."""
        try:
            return self._pool.submit(_version).result()
        except ImportError as error:
            raise ConfigError(
                f"vLLM cannot be imported ({error}): install it, or name a release with --vllm"
            ) from error

    def results(self, plan: Plan) -> Iterator[SeedResult]:
        """Each seed's result as it comes."""
        pinned(Knobs(), plan.pins)  # refuses what no knob is, before anything starts
        seeds = iter(plan.seeds)
        running: set[Future[SeedResult]] = set()
        while True:
            for seed in seeds:
                running.add(self._pool.submit(_run, seed, plan.steps, dict(plan.pins), plan.mutant))
                if len(running) >= 2 * self._jobs:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    def reproduce(self, plan: Plan, result: SeedResult) -> Reproduction:
        """Look for the shortest form of a failure."""
        steps, pins = self._pool.submit(_shrink, result, dict(plan.pins), plan.mutant).result()
        return Reproduction(result, steps, pins)

    def mutants(self) -> list[str]:
        """Names of the mutants."""
        return self._pool.submit(_mutants).result()

    def catch(self, mutant: str, seeds: range, steps: int) -> SeedResult | None:
        """The first seed in which a mutant is caught, None when it survives them all."""
        return self._pool.submit(_catch, mutant, seeds, steps).result()

    def replays(self, paths: Sequence[Path], arms: Sequence[Arm], server: Server) -> Iterator[Figures]:
        """Each arm's replay of these traces as it comes."""
        for future in as_completed([self._pool.submit(_replay, list(paths), arm, server) for arm in arms]):
            yield future.result()


def _prepare(import_path: str | None) -> None:
    if import_path:
        sys.path.insert(0, import_path)


def _version() -> str:
    from inpage.sim import engine

    return engine.VERSION


def _run(seed: int, steps: int, pins: dict[str, str], mutant: str | None) -> SeedResult:
    from inpage.sim.mutants import find
    from inpage.sim.run import run_seed

    if mutant is None:
        return run_seed(seed, steps, pins)
    broken = find(mutant)
    return run_seed(seed, steps, dict(broken.pins) | pins, broken)


def _shrink(result: SeedResult, pins: dict[str, str], mutant: str | None) -> tuple[int, dict[str, str]]:
    from inpage.sim.shrink import shrink

    return shrink(result, pins, lambda steps, tried: _run(result.seed, steps, dict(tried), mutant))


def _mutants() -> list[str]:
    from inpage.sim.mutants import MUTANTS

    return list(MUTANTS)


def _catch(mutant: str, seeds: range, steps: int) -> SeedResult | None:
    for seed in seeds:
        result = _run(seed, steps, {}, mutant)
        if result.failure is not None:
            return result
    return None


def _replay(paths: list[Path], arm: Arm, server: Server) -> Figures:
    from inpage.sim.study import Replay

    return Replay(read_traces(paths), arm, server).run()


def summary(results: Sequence[SeedResult], version: str, reproductions: Mapping[int, str]) -> dict[str, Any]:
    """A campaign's figures, as they go into JSON; `reproductions` has a command line by failing seed."""
    totals: Counter[str] = Counter()
    for result in results:
        totals.update(result.figures)
    seconds = sum(result.seconds for result in results)
    return {
        "vllm_version": version,
        "seeds": len(results),
        "failures": sum(result.failure is not None for result in results),
        **totals,
        "processor_seconds": round(seconds, 3),
        "steps_per_second": round(totals["steps"] / seconds, 1) if seconds else 0.0,
        "failed": [
            {"seed": result.seed, **asdict(result.failure), "reproduce": reproductions.get(result.seed)}
            for result in results
            if result.failure is not None
        ],
        "runs": [
            {"seed": result.seed, "knobs": asdict(result.knobs), "seconds": round(result.seconds, 3)} | result.figures
            for result in sorted(results, key=lambda result: result.seed)
        ],
    }
