"""`inpage doctor`: the environment, a command that would be served, or a running server, in plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from inpage.doctor import environment, launch, running
from inpage.doctor.finding import Finding, Level
from inpage.errors import ConfigError
from inpage.gates.server import Server
from inpage.layout.geometry import Geometry
from inpage.layout.units import parse_memory
from inpage.serve.arguments import ServerArguments
from inpage.serve.model import read_geometry, read_shape

MARKS = {
    Level.OK: "[green]ok[/]",
    Level.INFO: "[dim]info[/]",
    Level.ADVICE: "[yellow]advice[/]",
    Level.WRONG: "[bold red]wrong[/]",
}


def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A model folder whose serving is judged.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask this server instead of the environment.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of the pool on one rank, like 18475MiB.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="INPAGE_API_KEY", help="Bearer token.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the findings here as JSON.")] = None,
) -> None:
    """Say what is on, what is off and why, and which flag changes it; no engine is started.

    Flags of vLLM's server can be added after MODEL: they are judged as if it were served with them. Exit status: 0, 1
    when something is wrong, 2 for bad input or no server.
    """
    given = ServerArguments(context.args)
    if model is not None and model.startswith("-"):
        raise ConfigError(f"{model}: flags of the server are judged together with a MODEL, which comes first")
    findings: list[Finding] = []
    if url is not None:
        server = Server.connect(url, None, 30.0, api_key)
        findings += running.examine(server, _geometry(model, given))
    else:
        found = environment.Surroundings.here()
        findings += environment.examine(found)
        if model is not None:
            engine = "gaudi" if found.gaudi else "cpu"
            findings += launch.examine(model, given, parse_memory(memory) if memory else None, engine)
    show(findings, Console(highlight=False))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps([one.model_dump() for one in findings], indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {json_path}: {error.strerror}.") from error
    raise typer.Exit(int(any(one.level == Level.WRONG for one in findings)))


def _geometry(model: str | None, given: ServerArguments) -> Geometry | None:
    shape = read_shape(model, given) if model is not None else None
    return read_geometry(shape, given) if shape is not None else None


def show(findings: list[Finding], console: Console) -> None:
    """One row a finding, and what to change under it."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        change = f"\n[bold]change:[/] {_plain(one.change)}" if one.change else ""
        table.add_row(MARKS[one.level], one.topic, f"{_plain(one.text)}{change}")
    console.print(table)
    counts = {level: sum(one.level == level for one in findings) for level in Level}
    console.print(f"{counts[Level.WRONG]} wrong, {counts[Level.ADVICE]} to consider, {len(findings)} looked at")


def _plain(text: str | None) -> str:
    """No markup inside what was found."""
    return (text or "").replace("[", r"\[")
