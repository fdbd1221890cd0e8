"""`inpage replay` and `inpage report`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inpage.errors import ConfigError
from inpage.replay.client import SESSION_HEADER
from inpage.replay.compare import render_table
from inpage.replay.report import write_report
from inpage.replay.result import ArmResult, TurnRecord, load_result, save_result
from inpage.replay.runner import ReplayInterrupted, replay_arm
from inpage.replay.sessions import SessionSpec, total_turns

ARM_ORDER = ("off", "native", "per-block", "in-page")


def replay(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")],
    arm: Annotated[str, typer.Option(help="Name of this run: off, native, per-block, in-page …")] = "server",
    sessions: Annotated[int, typer.Option(help="Sessions that run at once.")] = 4,
    start_tokens: Annotated[int, typer.Option(help="Prompt of the first turn, in tokens.")] = 8192,
    end_tokens: Annotated[int, typer.Option(help="Turns go on up to this prompt, in tokens.")] = 65536,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each turn adds to the prompt.")] = 3000,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated each turn.")] = 200,
    system_tokens: Annotated[
        int | None,
        typer.Option(help="System prompt and tools, shared by all sessions; default: half of --start-tokens."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes the transcripts; the same for every arm.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for ARM.json, report.html and plots.")] = Path("replay"),
    model: Annotated[str | None, typer.Option(help="Served model; default: the first listed.")] = None,
    timeout: Annotated[float, typer.Option(help="Longest silence of the server, in seconds.")] = 600.0,
    warmup: Annotated[bool, typer.Option(help="First one untimed session of other text.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Send nothing that only vLLM understands.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="INPAGE_API_KEY", help="Bearer token.")] = None,
    session_header: Annotated[str, typer.Option(help="Names the session, for a router.")] = SESSION_HEADER,
) -> None:
    """Replay agent sessions against a running OpenAI-compatible server and measure it.

    Writes OUT/ARM.json, and OUT/report.html from every arm in OUT. Run it once per arm, each against a
    freshly started server. Exit status: 0, 1 when a turn failed, 2 for bad input or no server, 130 after
    Ctrl-C (what was measured is written).
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", arm):
        raise ConfigError(f"--arm is {arm!r}: it names a file, so use up to 40 letters, digits, '.', '_' or '-'")
    if system_tokens is None:
        system_tokens = start_tokens // 2
    spec = SessionSpec(
        sessions, start_tokens, end_tokens, new_tokens, output_tokens, system_tokens=system_tokens, seed=seed
    )
    file = _folder(out) / f"{arm}.json"
    others = [load_result(path) for path in sorted(out.glob("*.json")) if path != file]
    with _progress() as progress:
        task = progress.add_task(arm, total=total_turns(spec), last="calibrating")

        def show(turn: TurnRecord) -> None:
            last = "failed" if turn.error else f"TTFT {turn.ttft_s or 0:.2f} s at turn {turn.turn}"
            progress.update(task, advance=1, last=last)

        try:
            result = replay_arm(
                url,
                spec,
                arm=arm,
                model=model,
                on_turn=show,
                plain=plain,
                warmup=warmup,
                timeout_s=timeout,
                api_key=api_key,
                session_header=session_header,
            )
            status = 0 if result.complete else 1
        except ReplayInterrupted as interruption:
            result, status = interruption.result, 130
        # Before anything is printed: Ctrl-C also ends whatever the output is piped into.
        save_result(result, file)
    _show(sorted([*others, result], key=_place), out, "Agent replay")
    raise typer.Exit(status)


def report(
    files: Annotated[list[Path], typer.Argument(help="JSON files of `inpage replay`; the first is the base.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and plots.")] = Path("replay"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Agent replay",
) -> None:
    """Put the results of several arms side by side: a table, and a self-contained HTML page."""
    _show([load_result(path) for path in files], _folder(out), title)


def _show(results: list[ArmResult], out: Path, title: str) -> None:
    console = Console()
    console.print(render_table(results))
    console.print(f"report: {write_report(results, out, title=title)}", highlight=False, soft_wrap=True)


def _place(result: ArmResult) -> tuple[int, str]:
    place = ARM_ORDER.index(result.arm) if result.arm in ARM_ORDER else len(ARM_ORDER)
    return place, result.started_at


def _folder(out: Path) -> Path:
    """Make the folder now, so that a path that cannot be one fails before hours of measurement."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out is {out}: cannot make that folder ({error.strerror})") from error
    return out


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
        console=Console(stderr=True),
    )
