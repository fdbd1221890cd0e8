"""`inpage gate`: correctness gates against any OpenAI-compatible vLLM server, over HTTP alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from inpage.errors import ConfigError
from inpage.gates.bench import Bench, Sizes
from inpage.gates.report import print_report, write_json, write_junit
from inpage.gates.result import GateResult
from inpage.gates.run import GATES, Gate, chosen_gates, run_gates
from inpage.gates.server import Server

DEFAULTS = Sizes()


def gate(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")],
    only: Annotated[str | None, typer.Option(help=f"Of {', '.join(GATES)}, with commas.")] = None,
    case: Annotated[int | None, typer.Option(help="One case of the one gate in --only.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes every prompt.")] = DEFAULTS.seed,
    model: Annotated[str | None, typer.Option(help="Served model; default: the first listed.")] = None,
    block: Annotated[int | None, typer.Option(help="Block in tokens; default: probed.")] = None,
    vocab: Annotated[int, typer.Option(help="Prompts are token ids below this.")] = DEFAULTS.vocab,
    prompts: Annotated[int, typer.Option(help="parity: prompts.")] = DEFAULTS.prompts,
    shapes: Annotated[str, typer.Option(help="parity: shapes, with commas.")] = DEFAULTS.shapes,
    longest: Annotated[int | None, typer.Option(help="Longest prompt in tokens; default: 5 blocks.")] = None,
    output: Annotated[int, typer.Option(help="Tokens generated for a comparison.")] = DEFAULTS.output,
    drift_prompts: Annotated[int, typer.Option(help="drift: prompts.")] = DEFAULTS.drift_prompts,
    drift_output: Annotated[int, typer.Option(help="drift: tokens generated.")] = DEFAULTS.drift_output,
    rounds: Annotated[int, typer.Option(help="isolation: rounds.")] = DEFAULTS.rounds,
    needle_tokens: Annotated[int | None, typer.Option(help="needles: text in tokens; default: 8 blocks.")] = None,
    depths: Annotated[str, typer.Option(help="needles: depths from 0 to 1, with commas.")] = DEFAULTS.depths,
    preempt_rounds: Annotated[int, typer.Option(help="preemption: rounds.")] = DEFAULTS.preempt_rounds,
    pool_blocks: Annotated[int | None, typer.Option(help="preemption: blocks of the pool, if not in /metrics.")] = None,
    aborts: Annotated[int, typer.Option(help="aborts: requests cut off.")] = DEFAULTS.aborts,
    load_seconds: Annotated[float, typer.Option(help="mixed: length of the load.")] = DEFAULTS.load_seconds,
    load_threads: Annotated[int, typer.Option(help="mixed: clients of the load.")] = DEFAULTS.load_threads,
    timeout: Annotated[float, typer.Option(help="Longest wait for one answer, in seconds.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="INPAGE_API_KEY", help="Bearer token.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Not judged counts as failed.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the results here as JUnit XML.")] = None,
) -> None:
    """Check that a server's cache hits equal its cold runs, to the bit.

    Cold is a prompt under a fresh cache salt, hit the same under a used one. Exit status: 0, 1 when a gate failed or
    none passed, 2 for bad input or no server.
    """
    sizes = Sizes(
        prompts=prompts,
        shapes=shapes,
        longest=longest,
        output=output,
        drift_prompts=drift_prompts,
        drift_output=drift_output,
        rounds=rounds,
        needle_tokens=needle_tokens,
        depths=depths,
        preempt_rounds=preempt_rounds,
        pool_blocks=pool_blocks,
        aborts=aborts,
        load_seconds=load_seconds,
        load_threads=load_threads,
        vocab=vocab,
        seed=seed,
    )
    sizes.check()
    if block is not None and block < 2:
        raise ConfigError(f"--block {block}: a block has at least two tokens")
    gates = chosen_gates(only, case)
    console, narrator = Console(highlight=False), Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=narrator, transient=True) as progress:
        first = progress.add_task("asking the server, probing its block", total=None)
        server = Server.connect(url, model, timeout, api_key)
        server.learn_block(block, vocab, seed)
        progress.update(first, total=1, completed=1)
        bars = {}

        def starting(gate: Gate, bench: Bench) -> None:
            bar = bars[gate.name] = progress.add_task(f"{gate.name}: {gate.question}", total=None)
            bench.advance = lambda: progress.advance(bar)
            bench.expect = lambda total: progress.update(bar, total=total)

        def finished(result: GateResult) -> None:
            bar = bars[result.gate]
            progress.update(bar, description=f"{result.gate}: {result.verdict}", total=1, completed=1)
            if not narrator.is_terminal:
                narrator.print(f"{result.gate}: {result.verdict}, {result.summary} ({result.seconds:.0f} s)")

        command = ("inpage", "gate") if model is None else ("inpage", "gate", "--model", model)
        report = run_gates(gates, server, sizes, case, command, starting, finished)
    print_report(report, console)
    if json_path is not None:
        write_json(report, json_path)
    if junit is not None:
        write_junit(report, junit)
    raise typer.Exit(report.exit_status(strict))
