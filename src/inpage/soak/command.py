"""`inpage soak`: one real server with a small pool, thousands of requests, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from inpage.demo.model import DemoModel, make_model
from inpage.demo.server import ServerProcess
from inpage.errors import ConfigError, ServerError
from inpage.soak.result import Check, SoakResult, judge
from inpage.soak.runner import Soak, check_ready
from inpage.soak.workload import CROWD

BLOCK_TOKENS = 64
MODEL = DemoModel(heads=2, kv_heads=2, head_dim=64)
"""The demo's model with more KV a token, so that a page of 64 tokens holds a state."""
SEQUENCES = CROWD
BLOCKS = 64
"""Twelve requests of a few blocks do not fit at once: the pool preempts."""
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}


def server_arguments(blocks: int = BLOCKS) -> list[str]:
    """The flags of the soaked server."""
    return [
        "--enforce-eager",
        *("--max-model-len", "1024"),
        *("--block-size", str(BLOCK_TOKENS)),
        *("--max-num-seqs", str(SEQUENCES)),
        # A block a chunk, so that canaries are computed in the same chunks each time; many requests' chunks a step.
        *("--long-prefill-token-threshold", str(BLOCK_TOKENS)),
        *("--max-num-batched-tokens", str(SEQUENCES * BLOCK_TOKENS)),
        *("--num-gpu-blocks-override", str(blocks)),
        *("--mamba-ssm-cache-dtype", "float32"),
        "--disable-uvicorn-access-log",
    ]


def soak(
    requests: Annotated[int, typer.Option(help="How many requests to send.")] = 20_000,
    concurrency: Annotated[int, typer.Option(help="How many at a time.")] = 24,
    pauses: Annotated[int, typer.Option(help="How often the load is drained and everything checked.")] = 20,
    resets_every: Annotated[int, typer.Option(help="Requests between cache resets, in every other stretch.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the model, the server's log and soak.json.")] = Path("soak"),
) -> None:
    """Soak one in-page server: aborts, preemptions, resets; memory flat, all slots home, 0 wrong. Status 1 if not."""
    if requests < pauses or min(concurrency, pauses - 1, resets_every) < 1:
        raise ConfigError(
            f"{requests} requests, {concurrency} at a time, {pauses} pauses, a reset every {resets_every}: at least "
            "two pauses and one request for each are needed"
        )
    console = Console(highlight=False)
    model = str(make_model(out / "model", MODEL))
    result = SoakResult(requests=requests, concurrency=concurrency, seed=seed, server_arguments=server_arguments())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("starting the server", total=requests)
        process = ServerProcess(model, result.server_arguments, "in-page", out / "server.log", ENVIRONMENT)
        try:
            server = process.wait()
            check_ready(server)
            progress.update(bar, description="soaking")
            try:
                Soak(server, model, BLOCK_TOKENS, result, pauses, resets_every, lambda: progress.advance(bar)).run()
            except (ServerError, httpx.HTTPError) as error:
                result.errors.append(f"the server no longer answers: {error!r}")
        finally:
            process.stop()
            (out / "soak.json").write_text(result.model_dump_json(indent=1), encoding="utf-8")
    checks = judge(result)
    console.print(table(result, checks))
    for line in [*result.errors, *(text for pause in result.pauses for text in pause.wrong)][:10]:
        console.print(f"  {line}", style="red", soft_wrap=True)
    console.print(f"all of it: {out / 'soak.json'}; the server's log: {out / 'server.log'}", soft_wrap=True)
    if any(check.verdict == "failed" for check in checks):
        raise typer.Exit(1)


def table(result: SoakResult, checks: Sequence[Check]) -> Table:
    """The verdicts and their figures."""
    title = f"{result.requests:,} requests in {result.wall_s:,.0f} s, {result.tokens:,} tokens generated"
    shown = Table("check", "verdict", "figures", title=title)
    colours = {"passed": "green", "failed": "bold red", "not judged": "yellow"}
    for check in checks:
        shown.add_row(check.name, f"[{colours[check.verdict]}]{check.verdict}[/]", check.figures)
    return shown
