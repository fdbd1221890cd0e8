"""What came of a seed. Apart from `run`, so that it can be read where vLLM is not imported."""

from __future__ import annotations

from dataclasses import dataclass, field

from inpage.sim.knobs import Knobs


@dataclass(frozen=True)
class Failure:
    """What went wrong first. `check` is a row of the oracle's table, or who else noticed."""

    check: str
    message: str
    step: int
    request: str = ""
    block: int | None = None


@dataclass
class SeedResult:
    """One seed's figures; `seconds` is processor time of the steps alone."""

    seed: int
    knobs: Knobs
    seconds: float = 0.0
    figures: dict[str, int] = field(default_factory=dict)
    failure: Failure | None = None
