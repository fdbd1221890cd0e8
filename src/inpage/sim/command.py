"""`inpage simulate`: seeds through the real scheduler with an oracle, mutants, and recorded traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.units import parse_memory
from inpage.sim.arms import KINDS, QWEN_27B, Arm, Figures, Server, arms_at
from inpage.sim.costs import Costs, fitted
from inpage.sim.releases import release
from inpage.sim.trace_report import plot
from inpage.sim.trace_report import table as trace_table
from inpage.sim.traces import read_traces
from inpage.state.grid import Grid

if TYPE_CHECKING:
    from inpage.sim.campaign import Campaign, Plan
    from inpage.sim.result import SeedResult

MUTANT_SEEDS = 20
TRACES = "Traces"
DEFAULT_MEMORY = ("9GiB", "18475MiB", "36GiB")
DEFAULT_CHECKPOINTS = (16, 48)


def simulate(
    more: Annotated[list[Path] | None, typer.Argument(metavar="", hidden=True)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 20,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Scheduler steps of a seed.")] = 3000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    pins: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Pin a knob that the seed would draw.")
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="Another release of vLLM than the installed one.")] = None,
    vllm_folder: Annotated[
        Path | None, typer.Option(help="Where other releases are unpacked; INPAGE_RELEASES, or the user's cache.")
    ] = None,
    mutants: Annotated[bool, typer.Option("--mutants", help="Break each rule once: which check notices?")] = False,
    mutant: Annotated[str | None, typer.Option(help="Run the seeds with this rule broken.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Replay recorded traces instead of seeds: files or folders.", rich_help_panel=TRACES),
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="Pool sizes on one rank, like 18475MiB.", rich_help_panel=TRACES)
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A config.json for the geometry; Qwen 27B otherwise.", rich_help_panel=TRACES)
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only these of off, per-block, bounded, in-page.", rich_help_panel=TRACES)
    ] = None,
    checkpoints: Annotated[
        list[int] | None, typer.Option(min=1, help="K of the bounded pools.", rich_help_panel=TRACES)
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=0, help="Sessions at a time; 0: all, when they were recorded.", rich_help_panel=TRACES)
    ] = 4,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As given to vLLM.", rich_help_panel=TRACES)] = 4,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="As given to vLLM.", rich_help_panel=TRACES)
    ] = 1024,
    max_model_len: Annotated[int, typer.Option(min=1, help="As given to vLLM.", rich_help_panel=TRACES)] = 262144,
    retention: Annotated[
        str,
        typer.Option(help="value, dense (LRU alone), or sparse: vLLM 0.30.0's default.", rich_help_panel=TRACES),
    ] = "dense",
    prefix_match_unit: Annotated[
        int | None, typer.Option(min=1, help="As given to vLLM: hits inside a block.", rich_help_panel=TRACES)
    ] = None,
    prefill_rate: Annotated[float, typer.Option(help="Tokens a second.", rich_help_panel=TRACES)] = 1053.0,
    decode_rate: Annotated[float, typer.Option(help="Tokens a second and stream.", rich_help_panel=TRACES)] = 18.0,
    rates_from: Annotated[
        Path | None, typer.Option(help="Fit both rates to an arm of `inpage replay`.", rich_help_panel=TRACES)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw hit rate against memory.", rich_help_panel=TRACES)
    ] = None,
) -> None:
    """Drive vLLM's real scheduler and KV manager with exact symbolic states; exit 1 if any state is wrong.

    With --trace, replay recorded sessions through them once for each layout and memory size instead.
    """
    from inpage.sim.campaign import Campaign, Plan

    console = Console(highlight=False)
    path = release(vllm, vllm_folder) if vllm else None
    if more and not trace:
        raise ConfigError(f"{more[0]}: what is this file for? Traces come after --trace")
    if trace:
        geometry = QWEN_27B if model is None else Geometry.of(ModelShape.from_file(model))
        if unknown := sorted(set(arm or ()) - set(KINDS)):
            raise ConfigError(f"--arm {unknown[0]}: there are {', '.join(KINDS)}")
        if retention not in ("value", "dense", "sparse"):
            raise ConfigError(f"--retention is value, dense or sparse, not {retention!r}")
        server = Server(
            block_tokens=geometry.block_tokens,
            budget=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            retention_tokens=0 if retention == "sparse" else None,
            by_value=retention == "value",
            at_once=at_once,
            mark_tokens=Grid(geometry.block_tokens, prefix_match_unit).mark_tokens if prefix_match_unit else None,
            costs=fitted(rates_from) if rates_from else Costs(prefill_rate, decode_rate),
        )
        sizes = [parse_memory(size) for size in memory or DEFAULT_MEMORY]
        paths = [*trace, *(more or [])]
        read_traces(paths)  # refuses what is malformed before anything starts
        arms = [
            one
            for size in sizes
            for one in arms_at(size, geometry, checkpoints or DEFAULT_CHECKPOINTS)
            if one.kind in (arm or KINDS)
        ]
        if not arms:
            raise ConfigError(
                f"--arm {', '.join(arm or ())}: no such arm fits into {', '.join(memory or DEFAULT_MEMORY)}"
            )
        with Campaign(jobs, path) as campaign:
            found = _replay_traces(console, campaign, paths, arms, server)
        if json_path is not None:
            _write(json_path, {"server": asdict(server), "arms": [one.as_json() for one in found]})
        if plot_path is not None:
            marks = f", marks of {prefix_match_unit}" if prefix_match_unit else ""
            title = f"recorded sessions, blocks of {server.block_tokens} tokens{marks}, {retention} retention"
            plot(found, plot_path, title)
        return
    plan = Plan(range(first_seed, first_seed + seeds), steps, _pins(pins or []), mutant, path, jobs)
    with Campaign(jobs, path) as campaign:
        version = campaign.version()
        if mutants:
            passed, figures = _run_mutants(console, campaign, version, steps)
        else:
            passed, figures = _run_seeds(console, campaign, plan, version, vllm)
    if json_path is not None:
        _write(json_path, figures)
    if not passed:
        raise typer.Exit(1)


def _replay_traces(
    console: Console, campaign: Campaign, paths: Sequence[Path], arms: Sequence[Arm], server: Server
) -> list[Figures]:
    found = []
    with _bar(console) as bar:
        task = bar.add_task("replays", total=len(arms))
        for figures in campaign.replays(paths, arms, server):
            found.append(figures)
            bar.advance(task)
    found.sort(key=lambda figures: arms.index(figures.arm))
    console.print(trace_table(found, server.block_tokens))
    console.print(
        f"\n{found[0].turns:,} turns, {found[0].prompt_tokens:,} prompt tokens. Times follow the cost model: "
        f"{server.costs.prefill_rate:,.0f} tokens/s of prefill, {server.costs.decode_rate:,.1f} of decoding a stream.",
        soft_wrap=True,
    )
    return found


def _pins(texts: Sequence[str]) -> dict[str, str]:
    pins = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write KNOB=VALUE")
        pins[name.strip()] = value.strip()
    return pins


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _run_seeds(
    console: Console, campaign: Campaign, plan: Plan, version: str, vllm: str | None
) -> tuple[bool, dict[str, Any]]:
    from inpage.sim.campaign import summary
    from inpage.sim.shrink import command_line

    results: list[SeedResult] = []
    with _bar(console) as bar:
        task = bar.add_task(f"vLLM {version}", total=len(plan.seeds))
        for result in campaign.results(plan):
            results.append(result)
            bar.advance(task)
            if result.failure is not None:
                bar.console.print(f"seed {result.seed}: [red]{result.failure.check}[/]: {result.failure.message}")
    failed = sorted((r for r in results if r.failure is not None), key=lambda r: r.seed)
    reproductions = {}
    for result in failed[:3]:
        shortest = campaign.reproduce(plan, result)
        line = command_line(result.seed, shortest.steps, shortest.pins, mutant=plan.mutant, vllm=vllm)
        reproductions[result.seed] = line
    figures = summary(results, version, reproductions)
    console.print(_table(figures))
    for result in failed[:3]:
        failure = result.failure
        assert failure is not None
        where = f"seed {result.seed}, step {failure.step}"
        where += f", request {failure.request}" if failure.request else ""
        where += f", block {failure.block}" if failure.block is not None else ""
        console.print(f"\n[bold red]{failure.check}[/] ({where}): {failure.message}", soft_wrap=True)
        console.print(f"  {reproductions[result.seed]}", soft_wrap=True, markup=False)
    if len(failed) > 3:
        console.print(f"\n... and {len(failed) - 3} more seeds failed.")
    return not failed, figures


ROWS = (
    ("state checks", "checks", "each: a slot equals the fold over exactly the computed tokens"),
    ("failures", "failures", ""),
    ("steps", "steps", ""),
    ("requests", "requests", "finished or aborted"),
    ("preemptions", "preemptions", ""),
    ("dropped in the step", "dropped", "preempted after a block was published that nothing had written"),
    ("hits", "hits", "starts from a checkpoint"),
    ("restores", "restores", ""),
    ("saves", "saves", ""),
    ("refused hits", "refused_unwritten", "rule 4"),
    ("deferred", "deferred", "waited a step for a block that is being filled"),
    ("chunks cut", "cut", "would have passed a boundary without ending on it"),
    ("servable pages checked", "servable", ""),
    ("aborts", "aborts", ""),
    ("cache resets", "resets", ""),
)


def _table(figures: dict[str, Any]) -> Table:
    table = Table(f"vLLM {figures['vllm_version']}", box=None, padding=(0, 2, 0, 0))
    table.add_column(f"{figures['seeds']:,} seeds", justify="right", no_wrap=True)
    table.add_column("")
    for label, key, note in ROWS:
        table.add_row(label, f"{figures.get(key, 0):,}", f"[dim]{note}[/]")
    table.add_row("steps per second", f"{figures['steps_per_second']:,.0f}", "[dim]of one core's time[/]")
    return table


def _run_mutants(console: Console, campaign: Campaign, version: str, steps: int) -> tuple[bool, dict[str, Any]]:
    table = Table("mutant", "caught by", "seed", "step", "message", box=None, padding=(0, 2, 0, 0))
    rows: list[dict[str, Any]] = []
    names = campaign.mutants()
    with _bar(console) as bar:
        task = bar.add_task(f"vLLM {version}", total=len(names))
        for name in names:
            caught = campaign.catch(name, range(1, 1 + MUTANT_SEEDS), steps)
            failure = caught.failure if caught else None
            if caught is None or failure is None:
                table.add_row(name, "[bold red]nothing[/]", "", "", f"survived {MUTANT_SEEDS} seeds")
                rows.append({"mutant": name, "check": None})
            else:
                table.add_row(name, failure.check, str(caught.seed), str(failure.step), failure.message[:90])
                rows.append({"mutant": name, "check": failure.check, "seed": caught.seed, "step": failure.step})
            bar.advance(task)
    console.print(table)
    survivors = [row["mutant"] for row in rows if row["check"] is None]
    console.print(f"\n{len(rows) - len(survivors)} of {len(rows)} mutants caught on vLLM {version}.")
    return not survivors, {"vllm_version": version, "mutants": rows, "survivors": survivors}


def _write(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
