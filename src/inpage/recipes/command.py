"""`inpage recipe`: list the recipes, print one, check its figures against the plan, or run it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from inpage.errors import ConfigError
from inpage.layout.units import mib
from inpage.recipes import launch
from inpage.recipes.figures import differences, expected, session_tokens
from inpage.recipes.library import find, names
from inpage.recipes.schema import Profile, Recipe

MODELS = Path("demo") / "recipes"


def recipe(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A recipe's name, or a file; without it they are listed.")] = None,
    profile: Annotated[str | None, typer.Option(help="Release to serve with; default: the one installed here.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Become the server; more arguments of its are added.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare the expected figures with the plan's.")] = False,
    models: Annotated[Path, typer.Option(help="Where models are made that a recipe makes itself.")] = MODELS,
) -> None:
    """How a model is served: command, flags with reasons, expected block and pool, gates, measured results."""
    console = Console(highlight=False)
    if context.args and not run:
        raise ConfigError(f"{' '.join(context.args)}: no option of inpage recipe; arguments of the server need --run")
    if run and check:
        raise ConfigError("--run and --check exclude each other")
    if name is None:
        if run:
            raise ConfigError(f"--run needs a name; there are {', '.join(names())}")
        chosen = [find(each) for each in names()]
        if check:
            raise typer.Exit(_check(chosen, console))
        console.print(_list(chosen))
        return
    one = find(name)
    if check:
        raise typer.Exit(_check([one], console))
    profile_name, selected = launch.choose(one, profile)
    folder = models / one.name
    words = [*launch.command(one, selected, folder), *context.args]
    if run:
        _run(one, profile_name, selected, folder, words)
    _show(one, profile_name, selected, words, console)


def _run(one: Recipe, name: str, profile: Profile, folder: Path, words: list[str]) -> None:
    """Replace this process by the server; raises `ConfigError` before that where it cannot run."""
    launch.refuse_machine(one, name, profile)
    if one.made is not None and not (folder / "config.json").exists():
        from inpage.demo.model import DemoModel, make_model

        make_model(folder, DemoModel(**one.made))
    argv = launch.argv(words)
    typer.echo(shlex.join(words), err=True)
    sys.stderr.flush()
    os.execve(argv[0], argv, {**os.environ, **launch.environment(profile)})


def _check(recipes: list[Recipe], console: Console) -> int:
    """Print where files and plans differ; 1 when any does."""
    wrong = 0
    for one in recipes:
        lines = differences(one)
        wrong += bool(lines)
        console.print(f"{one.name}: {'as planned' if not lines else 'differs from the plan'}")
        for line in lines:
            console.print(f"  {line}")
        if lines:
            figures = [f"  {key}: {value}" for key, value in expected(one).model_dump().items()]
            console.print("\n".join(["expected:", *figures]))
    return 1 if wrong else 0


def _list(recipes: list[Recipe]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("profiles")
    for title in ("block", "pool, tokens", "measured"):
        table.add_column(title, justify="right")
    for one in recipes:
        figures = sum(len(profile.measured) for profile in one.profiles.values())
        profiles = ", ".join(one.profiles)
        block, pool = f"{one.expected.block_tokens:,}", f"{one.expected.printed_tokens:,}"
        table.add_row(one.name, profiles, block, pool, str(figures or "–"))
    return table


def _show(one: Recipe, name: str, profile: Profile, words: list[str], console: Console) -> None:
    others = [other for other in one.profiles if other != name]
    console.print(f"[bold]{one.title}[/]  ({one.name}, profile {name})")
    if others:
        console.print(f"[dim]also: --profile {', '.join(others)}[/]")
    for step in profile.install:
        console.print(f"\n[bold]Install[/]  [dim]{step.why}[/]\n  {step.run}", soft_wrap=True)
    console.print("\n[bold]Serve[/]")
    variables = [shlex.join([f"{key}={value}"]) for key, value in launch.environment(profile).items()]
    console.print("  " + " ".join([*variables, shlex.join(words)]), soft_wrap=True, markup=False)
    reasons = Table(box=box.SIMPLE_HEAD)
    reasons.add_column("setting", overflow="fold")
    reasons.add_column("why", overflow="fold")
    for variable in profile.environment:
        reasons.add_row(f"{variable.name}={variable.value}", variable.why)
    for flag in [*one.flags, *profile.flags]:
        reasons.add_row(" ".join(flag.words), flag.why)
    console.print(reasons)
    console.print(_expected(one))
    console.print(f"Pool on one rank: {one.pool.memory}, {one.pool.basis}. {one.pool.why}")
    if one.geometry is not None:
        console.print(f"Geometry: {one.geometry.source}")
    console.print("\n[bold]Gates to pass[/]")
    for gate in one.gates:
        console.print(f"  {gate.run}  [dim]{gate.why}[/]", soft_wrap=True)
    for note in [*one.notes, *profile.notes]:
        console.print(f"\n[bold]Note[/] {note}")
    if not profile.measured:
        console.print("\n[bold]Measured[/] nothing yet on this machine and profile.")
        return
    measured = Table("measured", "value", "with", "on", box=box.SIMPLE_HEAD)
    for figure in profile.measured:
        measured.add_row(figure.what, figure.value, figure.command, figure.machine)
    console.print(measured)


def _expected(one: Recipe) -> Table:
    e = one.expected
    table = Table(title="Expected on one rank (inpage plan)", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_row("block, the shortest prefix that can hit", f"{e.block_tokens:,} tokens")
    table.add_row("state of a GDN layer, in an attention page of", f"{mib(e.state_bytes)} in {mib(e.page_bytes)}")
    table.add_row("blocks, of all layers each", f"{e.num_blocks:,} of {mib(e.block_bytes)}")
    table.add_row("KV cache size that vLLM prints", f"{e.printed_tokens:,} tokens")
    length = session_tokens(one)
    table.add_row(f"sessions of {length:,} tokens that stay cached", f"{e.sessions_64k:,}")
    table.add_row("slots, beside the pool", f"{e.slots:,}, {mib(e.slot_bytes)}")
    return table
