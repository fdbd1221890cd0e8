"""`inpage demo`: for each arm start the real server, replay the same sessions, compare hit with cold, stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from inpage.demo.cases import BLOCK_TOKENS, CASES, MAX_MODEL_LEN, SEQUENCES, WITH_MARKS, DemoCase, layout_of
from inpage.demo.model import make_model
from inpage.demo.server import RunningServer, ServerProcess
from inpage.errors import ConfigError
from inpage.gates.parity import Completions, Parity, make_cases, run_parity
from inpage.replay.compare import render_table
from inpage.replay.report import Section, write_report
from inpage.replay.result import ArmResult, prefill_by_arithmetic, prefilled, save_result
from inpage.replay.runner import replay_arm
from inpage.replay.sessions import total_turns

PARITY_OUTPUT_TOKENS = 8
PARITY_LONGEST_TOKENS = 1200
PREFILL_TOLERANCE = 0.03
PARITY_VOCAB = 250
"""Token ids below this are plain bytes of the demo's tokenizer."""


@dataclass(frozen=True)
class Arm:
    """What one arm of the demo gave."""

    name: str
    result: ArmResult
    parity: Parity | None
    server_lines: tuple[str, ...]


class ArmBar:
    """One arm's line of the progress display."""

    def __init__(self, progress: Progress, arm: str) -> None:
        self._progress, self._arm = progress, arm
        self._task = progress.add_task(f"{arm}: starting the server", total=None)

    def starting(self, seconds: float) -> None:
        """The server has not answered for so long."""
        self._progress.update(self._task, description=f"{self._arm}: starting the server ({seconds:.0f} s)")

    def phase(self, name: str, total: int) -> None:
        """A new phase of `total` parts begins."""
        self._progress.update(self._task, description=f"{self._arm}: {name}", total=total, completed=0)

    def advance(self, part: object = None) -> None:
        """One part is done."""
        self._progress.advance(self._task)


def server_arguments(case: DemoCase, arm: str = "") -> list[str]:
    """The flags that all arms share, and that of marks for the arm which has them."""
    return [
        "--enforce-eager",
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", str(SEQUENCES)),
        *("--max-num-batched-tokens", str(case.budget)),
        *("--num-gpu-blocks-override", str(case.blocks)),
        *("--mamba-ssm-cache-dtype", "float32"),
        *(() if case.retention is None else ("--prefix-cache-retention-interval", str(case.retention))),
        *(("--prefix-match-unit", str(case.unit_tokens(arm))) if arm == WITH_MARKS else ()),
    ]


def run_arms(case: DemoCase, model: Path, out: Path, progress: Progress) -> list[Arm]:
    """Serve, replay, compare, stop, for each arm in turn.

    The next server starts while hits are compared with cold runs on this one, which nobody times; so the arm
    that has nothing to compare comes last.
    """
    names = sorted(case.arms, key=lambda name: name == "off")
    arms: dict[str, Arm] = {}
    with ExitStack() as servers:

        def start(name: str) -> ServerProcess:
            # vLLM's CPU engine wants a size in GiB even where the number of blocks is given.
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
            log = out / f"{name}.server.log"
            server = ServerProcess(str(model), server_arguments(case, name), layout_of(name), log, environment)
            servers.callback(server.stop)
            return server

        process = start(names[0])
        for name, following in zip(names, [*names[1:], None], strict=True):
            bar = ArmBar(progress, name)
            server = process.wait(bar.starting)
            bar.phase("replaying", total_turns(case.sessions))
            result = replay_arm(server.url, case.sessions, arm=name, on_turn=bar.advance)
            ended, process = process, start(following) if following else process
            parity = None
            if case.parity_prompts and name != "off":
                bar.phase("hit = cold?", case.parity_prompts)
                parity = compare_hits(case, server, str(model), bar.advance)
            ended.stop()
            bar.phase("done", 1)
            bar.advance()
            save_result(result, out / f"{name}.json")
            arms[name] = Arm(name, result, parity, server_lines(server))
    return [arms[name] for name in case.arms]


def compare_hits(case: DemoCase, server: RunningServer, model: str, done: Callable[[], None]) -> Parity:
    """Cold and hit runs of the parity prompts on this server."""
    cases = make_cases(case.parity_prompts, BLOCK_TOKENS, PARITY_LONGEST_TOKENS, PARITY_VOCAB)
    completions = Completions(server.url, model, PARITY_OUTPUT_TOKENS)
    unrelated = [index % PARITY_VOCAB for index in range(BLOCK_TOKENS + 16)]
    return run_parity(completions, cases, unrelated, done)


def server_lines(server: RunningServer) -> tuple[str, ...]:
    """What a server said of its pool, and an in-page one of itself and of its last counters."""
    lines = [*server.lines("KV cache size"), *server.lines("inpage:"), *server.lines("inpage worker")[-1:]]
    return tuple(line.split("] ", 1)[-1] for line in lines)


def exactness_rows(arms: list[Arm]) -> list[list[str]]:
    """One row per arm: do hits equal cold?"""
    rows = []
    for arm in arms:
        if arm.parity is None:
            rows.append([arm.name, "—", "—", "—", "nothing is cached"])
            continue
        prompts = len(arm.parity.comparisons)
        verdict = "exact" if arm.parity.exact else "WRONG"
        rows.append(
            [
                arm.name,
                str(prompts),
                str(arm.parity.hits),
                f"{arm.parity.equal} of {prompts}",
                f"{verdict}, largest logprob drift {arm.parity.worst_drift:.3g}",
            ]
        )
    return rows


EXACTNESS_HEADERS = ("arm", "prompts", "hit", "hit = cold to the bit", "verdict")


def as_table(section: Section) -> Table:
    """A section's rows for the terminal."""
    headers, rows = section.table or ((), ())
    table = Table(*headers, title=section.heading)
    for row in rows:
        table.add_row(*row)
    return table


def prefill_of(case: DemoCase, arm: Arm) -> tuple[float, float]:
    """Mean tokens that a later turn prefills: by arithmetic, and measured."""
    expected = prefill_by_arithmetic(arm.result, case.unit_tokens(arm.name))
    measured = prefilled(turn for turn in arm.result.turns if turn.turn > 1)
    return fmean(expected or [nan]), fmean(measured or [nan])


def prefill_rows(case: DemoCase, arms: list[Arm]) -> list[list[str]]:
    """One row per arm: what a later turn has to prefill, and what it did."""
    rows = []
    for arm in arms:
        expected, measured = prefill_of(case, arm)
        unit = str(case.unit_tokens(arm.name))
        rows.append([arm.name, unit, f"{expected:.1f}", f"{measured:.1f}", f"{measured / expected - 1:+.1%}"])
    return rows


PREFILL_HEADERS = ("arm", "hits in units of", "by arithmetic", "measured", "difference")


def report_sections(case: DemoCase, arms: list[Arm]) -> list[Section]:
    """What the report says beside the replay's own figures; the first ones are also shown on the terminal."""
    sections = []
    if case.parity_prompts:
        text = (
            f"{case.parity_prompts} prompts of four shapes (single, multi-turn, extension, diverging prefix), each cold "
            "and after its prefix was cached: every token and every log probability must be equal, no tolerance."
        )
        sections.append(Section("Are hits exact?", text, (EXACTNESS_HEADERS, exactness_rows(arms))))
    if case.has_marks:
        text = (
            "A turn sends the prompt before it again and loses a part of its last block, or of its last mark: that is "
            "arithmetic, and the means of all later turns must agree with it within 3%."
        )
        sections.append(Section("What does a later turn prefill?", text, (PREFILL_HEADERS, prefill_rows(case, arms))))
    lines = [[arm.name, "\n".join(arm.server_lines)] for arm in arms]
    return [*sections, Section("The servers", "What each server said of itself.", (("arm", "its lines"), lines))]


def failures(case: DemoCase, arms: list[Arm]) -> list[str]:
    """Why the demo as a whole failed; stock arms may be inexact, in-page may not."""
    lines = []
    for arm in arms:
        if not arm.result.complete:
            errors = sum(turn.error is not None for turn in arm.result.turns)
            lines.append(f"{arm.name}: {errors} requests failed, see {arm.name}.json and {arm.name}.server.log")
        if layout_of(arm.name) == "in-page" and arm.parity is not None and not arm.parity.exact:
            lines.append(f"{arm.name}: hits do not equal cold runs")
        if case.has_marks and arm.result.complete:
            expected, measured = prefill_of(case, arm)
            if not abs(measured / expected - 1) <= PREFILL_TOLERANCE:
                lines.append(f"{arm.name}: a later turn prefills {measured:.1f} tokens, by arithmetic {expected:.1f}")
    return lines


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report, the results and the servers' logs.")] = Path("demo"),
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}.")] = "arms",
    quick: Annotated[bool, typer.Option("--quick", help="The case `quick`: under two minutes.")] = False,
) -> None:
    """The main job: four layouts served by real vLLM, the same agent sessions replayed against each."""
    if case not in CASES:
        raise ConfigError(f"--case {case} is not one of {', '.join(CASES)}")
    chosen = CASES["quick" if quick else case]
    console = Console(highlight=False)
    began = time.monotonic()
    console.print(f"[bold]inpage demo[/], case {chosen.name}: {chosen.what}")
    out = out if chosen.name == "arms" else out / chosen.name
    out.mkdir(parents=True, exist_ok=True)
    model = make_model(out / "model", chosen.model)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        arms = run_arms(chosen, model, out, progress)
    results = [arm.result for arm in arms]
    console.print(render_table(results))
    sections = report_sections(chosen, arms)
    for section in sections[:-1]:
        console.print(as_table(section))
    page = write_report(results, out, title=f"inpage demo: {chosen.what}", sections=sections)
    console.print(f"report: [bold]{page}[/] ({time.monotonic() - began:.0f} s in all)")
    failed = failures(chosen, arms)
    for line in failed:
        console.print(f"[bold red]{line}[/]")
    raise typer.Exit(1 if failed else 0)
