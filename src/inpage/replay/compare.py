"""Arms side by side: the rows of figures, how they compare with the first arm, and what to be warned of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from inpage.errors import ConfigError
from inpage.replay.result import NOT_REPORTED, ArmResult, Summary, summarize

Better = Literal["", "less", "more"]
# Label, field of Summary, and whether less or more of it is better.
FIGURES: tuple[tuple[str, str, Better], ...] = (
    ("wall (s)", "wall_s", "less"),
    ("TTFT turn 1, {} (s)", "ttft_first", "less"),
    ("TTFT later, {} (s)", "ttft_later", "less"),
    ("decode, {} (tok/s)", "decode_tok_s", "more"),
    ("cached tokens, {}", "cached_per_later_turn", ""),
    ("prefilled tokens, {}", "prefilled_per_later_turn", ""),
    ("hit rate, later turns", "hit_rate_later", ""),
    ("hit rate, all turns", "hit_rate_all", ""),
)


@dataclass(frozen=True)
class Row:
    """One figure over all arms: per arm its value, and the gain over the first arm (above 1 is better)."""

    label: str
    cells: tuple[tuple[str, float | None], ...]
    better: Better = ""
    ends_group: bool = False


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown about some arms, in the order of the results."""

    labels: tuple[str, ...]
    summaries: tuple[Summary, ...]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]


def compare(results: Sequence[ArmResult]) -> Comparison:
    """Put arms side by side, the first as the base; raises `ConfigError` when there is none.

    An arm is set in relation to the first only if both ran the same transcripts to the end without errors.
    """
    if not results:
        raise ConfigError("there is no result to report: run `inpage replay` first")
    base = results[0]
    seen: Counter[str] = Counter()
    labels = []
    for result in results:
        seen[result.arm] += 1
        labels.append(result.arm if seen[result.arm] == 1 else f"{result.arm} ({seen[result.arm]})")
    summaries = [summarize(result) for result in results]
    related = [
        result is not base and base.complete and result.complete and result.transcript_digest == base.transcript_digest
        for result in results
    ]
    rows, warnings = _rows(summaries, related), _warnings(results, labels, summaries)
    return Comparison(tuple(labels), tuple(summaries), tuple(rows), tuple(warnings))


def _rows(summaries: Sequence[Summary], related: Sequence[bool]) -> list[Row]:
    rows = []
    for label, field, better in FIGURES:
        figures = [getattr(summary, field) for summary in summaries]
        for which in ("mean", "p50", "p90") if "{}" in label else ("",):
            values = [getattr(f, which, None) if which else f for f in figures]
            cells = tuple(
                (_show(field, value, summary), _gain(values[0], value, better) if near else None)
                for value, summary, near in zip(values, summaries, related, strict=True)
            )
            ends_group = which == "p90" or field in ("wall_s", "hit_rate_all")
            rows.append(Row(label.format(which), cells, better, ends_group))
    rows.append(Row("turns done / planned", tuple((f"{s.done} / {s.planned}", None) for s in summaries)))
    rows.append(Row("errors", tuple((str(s.errors), None) for s in summaries)))
    return rows


def _show(field: str, value: float | None, summary: Summary) -> str:
    if value is not None:
        return f"{value:.1%}" if "hit_rate" in field else number(value)
    unknown = summary.done > 0 and summary.hit_rate_all is None and field.startswith(("hit", "cached", "prefilled"))
    return "not reported" if unknown else "–"


def number(value: float) -> str:
    """A figure with about three digits: 1,214 · 31.6 · 2.60 · 0.043."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _gain(base: float | None, value: float | None, better: Better) -> float | None:
    if not base or not value or not better:
        return None
    return base / value if better == "less" else value / base


def gain_text(gain: float, better: Better) -> str:
    """A gain in words: 4.32× faster, 1.05× slower, 2.40× higher, same."""
    if abs(gain - 1) < 0.005:
        return "same"
    up, down = ("faster", "slower") if better == "less" else ("higher", "lower")
    return f"{number(gain)}× {up}" if gain > 1 else f"{number(1 / gain)}× {down}"


def _warnings(results: Sequence[ArmResult], labels: Sequence[str], summaries: Sequence[Summary]) -> list[str]:
    first = results[0].transcript_digest
    other = [label for label, r in zip(labels, results, strict=True) if r.transcript_digest != first]
    warnings = []
    if other:
        warnings.append(
            f"not the same work: {', '.join(other)} ran other transcripts than {labels[0]} (other settings, "
            "seed or tokenizer); the figures stand side by side but do not compare, and no ratio is given"
        )
    for label, result, summary in zip(labels, results, summaries, strict=True):
        if result.note:
            warnings.append(f"{label}: {result.note}")
        failed = next((turn for turn in result.turns if turn.error is not None), None)
        if failed is not None:
            warnings.append(
                f"{label}: {summary.errors} of {result.settings.sessions} sessions ended in an error; the first: "
                f"session {failed.session}, turn {failed.turn}: {failed.error}"
            )
        if summary.done and summary.hit_rate_all is None:
            warnings.append(f"{label}: hit rate not reported: {NOT_REPORTED}")
        if not result.complete:
            warnings.append(f"{label}: {summary.done} of {summary.planned} turns done; no ratio is given")
    return warnings


def render_table(results: Sequence[ArmResult]) -> Table:
    """The comparison as a table for the terminal, with what to be warned of below it."""
    comparison = compare(results)
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", min_width=72)
    table.add_column("")
    for label in comparison.labels:
        table.add_column(Text(label), justify="right")
    for row in comparison.rows:
        cells = [
            Text.assemble(value, (f" {number(gain)}×", "green" if gain >= 1 else "red") if gain else "")
            for value, gain in row.cells
        ]
        table.add_row(row.label, *cells, end_section=row.ends_group)
    caption = Text()
    if any(gain for row in comparison.rows for _, gain in row.cells):
        caption.append(f"n×: gain over {comparison.labels[0]} (faster or higher; below 1 is worse)\n", "dim")
    caption.append("\n".join(f"! {warning}" for warning in comparison.warnings), "yellow")
    table.caption = caption
    return table
