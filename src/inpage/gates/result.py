"""What a gate says: one result type for the table, JSON and JUnit."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

SHOWN_FAILURES = 10
"""Failures that a result carries in full; the count is complete."""


class Verdict(StrEnum):
    """A gate that could not reach what it is about is not judged, which is not a pass.

    `ENGINE` is no pass either: hits differ from their cold runs, as cold runs with other chunks do.
    """

    PASS = "pass"
    FAIL = "fail"
    ENGINE = "property of the engine"
    NOT_JUDGED = "not judged"


class Failure(BaseModel):
    """One thing that was wrong, and how to see it again."""

    model_config = ConfigDict(frozen=True)

    case: int | None = Field(description="Index of the case inside the gate, None when it is not one case.")
    what: str = Field(description="What was expected and what came.")
    repeat: str = Field(description="The command that repeats it.")


class GateResult(BaseModel):
    """One gate's verdict with what it rests on."""

    model_config = ConfigDict(frozen=True)

    gate: str
    verdict: Verdict
    summary: str = Field(description="One sentence with the figures that matter.")
    figures: dict[str, float | int | str] = Field(description="All that was counted and measured.")
    missing: str | None = Field(description="What the server or the run could not give; why it is not judged.")
    engine: str | None = Field(
        default=None, description="Hits that differ as cold runs with other chunks do, in one line; what to change."
    )
    failures: list[Failure] = Field(description=f"The first {SHOWN_FAILURES} failures.")
    failure_count: int
    seconds: float
    repeat: str = Field(description="The command that runs this gate again with the same prompts.")


class GateReport(BaseModel):
    """All gates of a run, and the server they ran against."""

    url: str
    model: str
    server_version: str | None
    block_tokens: int | None
    block_source: str
    max_model_len: int | None
    pool_blocks: int | None
    cached_counts_from: str = Field(description="usage, metrics, or none: where hits were read.")
    notes: list[str]
    seed: int
    started_at: str
    seconds: float
    results: list[GateResult]

    def count(self, verdict: Verdict) -> int:
        """How many gates ended with this verdict."""
        return sum(result.verdict == verdict for result in self.results)

    def exit_status(self, strict: bool = False) -> int:
        """0 when something passed and nothing failed; `strict` wants every gate passed."""
        wrong = self.count(Verdict.FAIL) or not self.count(Verdict.PASS)
        return int(bool(wrong or (strict and self.count(Verdict.PASS) < len(self.results))))
