"""Runs the chosen gates one after the other; a server that dies fails the gate that killed it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from inpage.errors import ConfigError, ServerError
from inpage.gates import aborts, drift, edges, isolation, mixed, needles, one_token, parity, preemption
from inpage.gates.bench import NO_HITS, Bench, Judge, Sizes
from inpage.gates.client import ServerGoneError
from inpage.gates.result import SHOWN_FAILURES, Failure, GateReport, GateResult, Verdict
from inpage.gates.server import Server


@dataclass(frozen=True)
class Gate:
    """A gate: its name, what it asks in a few words, and how it is run."""

    name: str
    question: str
    run: Callable[[Bench], GateResult]
    needs_hits: bool = True
    has_cases: bool = True


GATES = {
    gate.name: gate
    for gate in (
        Gate("parity", "do hits equal cold runs, in four shapes?", parity.gate),
        Gate("drift", "do two hits agree, whatever ran in between?", drift.gate),
        Gate("isolation", "does one tenant's prompt change another's answer?", isolation.gate),
        Gate("edges", "are prompts around a boundary right?", edges.gate),
        Gate("one-token", "does a one-token prompt read an old state?", one_token.gate, needs_hits=False),
        Gate("needles", "does a hit find what the cold run finds?", needles.gate),
        Gate("preemption", "does a preempted request go on rightly?", preemption.gate),
        Gate("aborts", "does an abort storm leave everything in order?", aborts.gate, has_cases=False),
        Gate("mixed", "are hits right beside and after a mixed load?", mixed.gate, has_cases=False),
    )
}


def chosen_gates(only: str | None, case: int | None) -> list[Gate]:
    """The gates of `--only`, all of them without it; `ConfigError` for a name or a case that there is not."""
    names = list(GATES) if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in GATES]:
        raise ConfigError(f"--only {','.join(unknown)}: there are {', '.join(GATES)}")
    if case is not None and (len(names) != 1 or not GATES[names[0]].has_cases):
        raise ConfigError("--case names a case of one gate: give --only with one of those that have cases")
    return [GATES[name] for name in names]


def run_gate(gate: Gate, bench: Bench) -> GateResult:
    """One gate; what the server refuses or does not survive is a failure of the gate, not an error of the run."""
    began = time.monotonic()
    if gate.needs_hits and bench.server.about.cached_counts_from == "none":
        judge = Judge(bench)
        judge.unreached.append(NO_HITS)
        result = judge.result("nothing hits")
    else:
        try:
            result = gate.run(bench)
        except ServerError as error:
            judge = Judge(bench, by_case=False)
            judge.fail(None, str(error))
            gone = isinstance(error, ServerGoneError)
            result = judge.result("the server is gone" if gone else "the server answered with an error")
    return result.model_copy(update={"seconds": round(time.monotonic() - began, 1)})


def _failed_by(result: GateResult, what: str) -> GateResult:
    """The result with one more failure."""
    failures = [*result.failures, Failure(case=None, what=what, repeat=result.repeat)][:SHOWN_FAILURES]
    return result.model_copy(
        update={"verdict": Verdict.FAIL, "failures": failures, "failure_count": result.failure_count + 1}
    )


def run_gates(
    gates: list[Gate],
    server: Server,
    sizes: Sizes,
    only_case: int | None = None,
    command: tuple[str, ...] = ("inpage", "gate"),
    starting: Callable[[Gate, Bench], None] = lambda gate, bench: None,
    finished: Callable[[GateResult], None] = lambda result: None,
) -> GateReport:
    """All chosen gates in order; once the server is gone, the rest is not judged."""
    about, began = server.about, time.monotonic()
    report = GateReport(
        url=about.url,
        model=about.model,
        server_version=about.version,
        block_tokens=about.block_tokens,
        block_source=about.block_source,
        max_model_len=about.max_model_len,
        pool_blocks=sizes.pool_blocks or about.pool_blocks,
        cached_counts_from=about.cached_counts_from,
        notes=list(about.notes),
        seed=sizes.seed,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        results=[],
    )
    dead: str | None = None
    for gate in gates:
        bench = Bench(gate.name, server, sizes, only_case, command)
        starting(gate, bench)
        if dead:
            judge = Judge(bench)
            judge.unreached.append(f"the server no longer answers since the gate {dead}")
            result = judge.result("not run")
        else:
            result = run_gate(gate, bench)
            if (why := server.trouble()) is not None:
                dead = gate.name
                result = _failed_by(result, f"after the gate the server does not answer a short prompt: {why}")
        report.results.append(result)
        finished(result)
    return report.model_copy(update={"seconds": round(time.monotonic() - began, 1)})
