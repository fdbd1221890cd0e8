"""The `inpage` command: each subcommand lives beside what it runs, this module only lists them."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from inpage.demo.command import demo
from inpage.doctor.command import doctor
from inpage.errors import InPageError
from inpage.gates.command import gate
from inpage.layout.command import plan
from inpage.recipes.command import recipe
from inpage.replay.command import replay, report
from inpage.routing.command import route_config
from inpage.serve.command import serve
from inpage.sim.command import simulate
from inpage.soak.command import soak

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact prefix caching for Gated DeltaNet hybrids on vLLM.",
)
app.command()(demo)
app.command()(plan)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(replay)
app.command()(report)
app.command()(gate)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor)
app.command()(simulate)
app.command()(soak)
app.command(name="route-config")(route_config)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(recipe)


def main() -> None:
    """Run the command line; an error of our own is one clear message and exit status 2."""
    try:
        app()
    except InPageError as error:
        Console(stderr=True).print(f"[bold red]inpage:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
