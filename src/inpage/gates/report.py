"""A run of the gates as a table, JSON and JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inpage.errors import ConfigError
from inpage.gates.result import GateReport, GateResult, Verdict

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.ENGINE: "yellow", Verdict.NOT_JUDGED: "yellow"}


def print_report(report: GateReport, console: Console) -> None:
    """The table, then what failed and how to repeat it, then what is missing."""
    table = Table("gate", "verdict", "what was seen", "s", title=f"Gates against {report.url}, {report.model}")
    for result in report.results:
        colour = COLOURS[result.verdict]
        table.add_row(result.gate, f"[{colour}]{result.verdict}[/]", result.summary, f"{result.seconds:.0f}")
    console.print(table)
    console.print(
        f"vLLM {report.server_version or 'of unknown version'}, max-model-len {report.max_model_len}, pool of "
        f"{report.pool_blocks} blocks; block {report.block_tokens} ({report.block_source}); cached tokens read from "
        f"{report.cached_counts_from}",
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    for result in report.results:
        for failure in result.failures[:3]:
            case = "" if failure.case is None else f", case {failure.case}"
            console.print(f"[bold red]{result.gate}{case}:[/] {escape(failure.what)}", soft_wrap=True)
            console.print(f"  repeat: {failure.repeat}", soft_wrap=True, markup=False)
        if result.failure_count > 3:
            console.print(f"  and {result.failure_count - 3} more failures of {result.gate}")
        if result.engine:
            console.print(f"[yellow]{result.gate}, property of the engine:[/] {escape(result.engine)}", soft_wrap=True)
        if result.missing:
            console.print(f"[yellow]{result.gate}, missing:[/] {escape(result.missing)}", soft_wrap=True)
    engine = report.count(Verdict.ENGINE)
    console.print(
        f"{report.count(Verdict.PASS)} passed, {report.count(Verdict.FAIL)} failed, "
        + (f"{engine} a property of the engine, " if engine else "")
        + f"{report.count(Verdict.NOT_JUDGED)} not judged, in {report.seconds:.0f} s"
    )


def write_json(report: GateReport, path: Path) -> None:
    """The whole report; raises `ConfigError` when it cannot be written."""
    _write(path, report.model_dump_json(indent=2) + "\n")


def write_junit(report: GateReport, path: Path) -> None:
    """A test case a gate, `skipped` when it is not judged; raises `ConfigError` when it cannot be written."""
    suite = ET.Element(
        "testsuite",
        name="inpage gate",
        tests=str(len(report.results)),
        failures=str(report.count(Verdict.FAIL)),
        skipped=str(report.count(Verdict.NOT_JUDGED) + report.count(Verdict.ENGINE)),
        errors="0",
        time=f"{report.seconds:.1f}",
        timestamp=report.started_at,
        hostname=report.url,
    )
    for result in report.results:
        suite.append(_case(result))
    ET.indent(suite)
    text = ET.tostring(suite, encoding="unicode", xml_declaration=True)
    _write(path, text + "\n")


def _case(result: GateResult) -> ET.Element:
    case = ET.Element("testcase", classname="inpage.gates", name=result.gate, time=f"{result.seconds:.1f}")
    if result.verdict == Verdict.FAIL:
        failure = ET.SubElement(case, "failure", message=result.summary)
        failure.text = "\n".join(f"{found.what}\n  repeat: {found.repeat}" for found in result.failures)
    elif result.verdict != Verdict.PASS:
        ET.SubElement(case, "skipped", message=result.engine or result.missing or result.summary)
    ET.SubElement(case, "system-out").text = "\n".join(
        [result.summary, *(f"{name}: {value}" for name, value in result.figures.items()), f"repeat: {result.repeat}"]
    )
    return case


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
