"""Every mutant against every gate, on real servers: prints the table of docs/gates.md.

    .venv/bin/python tests/gates/record_mutants.py [MUTANT ...]

A broken server that dies is started again for the next mutant. About ten minutes on two cores.
"""

from __future__ import annotations

import sys
import tempfile
import uuid
from pathlib import Path

from broken_server import MUTANTS, break_rule, environment

from inpage.demo.cases import CASES
from inpage.demo.command import server_arguments
from inpage.demo.model import make_model
from inpage.demo.server import ServerProcess
from inpage.gates.bench import Sizes
from inpage.gates.result import GateReport
from inpage.gates.run import GATES, run_gates
from inpage.gates.server import Server

SIZES = Sizes(prompts=4, drift_prompts=1, rounds=2, preempt_rounds=2, aborts=12, load_seconds=2, longest=900)
JUDGED = [gate for name, gate in GATES.items() if name != "needles"]


def main(mutants: list[str]) -> None:
    """Print one row a mutant, as Markdown."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = make_model(work / "model")
        process: ServerProcess | None = None
        print(f"| mutant | {' | '.join(gate.name for gate in JUDGED)} |", flush=True)
        for mutant in ["", *mutants]:
            if process is None:
                folder = work / uuid.uuid4().hex
                process = start(model, folder)
                url = process.wait(timeout_s=600).url
            server = Server.connect(url, None, 120.0)
            server.learn_block(256, 250, 0)
            break_rule(folder, mutant)
            report = run_gates(JUDGED, server, SIZES)
            print(row(mutant, report), flush=True)
            for result in report.results:
                if result.failures:
                    print(f"    {result.gate}: {result.failures[0].what[:300]}", file=sys.stderr, flush=True)
            break_rule(folder, "")
            if server.trouble() is not None:
                process.stop()
                process = None
                log = (folder / "log").read_text(errors="replace")
                errors = [line for line in log.splitlines() if "StateError" in line]
                print(f"    {errors[-1] if errors else log[-500:]}", file=sys.stderr, flush=True)
        if process is not None:
            process.stop()


def start(model: Path, folder: Path) -> ServerProcess:
    """An in-page server that can be broken."""
    variables = {**environment(folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    return ServerProcess(str(model), server_arguments(CASES["quick"]), "in-page", folder / "log", variables)


def row(mutant: str, report: GateReport) -> str:
    """Verdicts in the order of the gates."""
    words = [f"{result.verdict}" for result in report.results]
    return f"| {mutant or 'nothing broken'} | {' | '.join(words)} |"


if __name__ == "__main__":
    main(sys.argv[1:] or list(MUTANTS))
