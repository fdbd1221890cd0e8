"""The plots of a report: drawn once as PNG for documents and once as SVG that follows the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from inpage.replay.compare import number
from inpage.replay.result import Summary, percentile

# Colours that stay apart for colour-blind readers (Okabe and Ito), fixed per arm; markers say it again.
ARM_STYLE = {
    "off": ("#7f7f7f", "s"),
    "native": ("#e69f00", "^"),
    "per-block": ("#cc79a7", "D"),
    "in-page": ("#0072b2", "o"),
}
OTHER_STYLES = [("#009e73", "v"), ("#d55e00", "P"), ("#56b4e9", "X"), ("#b8860b", "*")]
# Stands for the colour of text; becomes `currentColor` in the SVG.
INK = "#010203"


@dataclass(frozen=True)
class Plot:
    """A plot as inline SVG and the stem of its PNG file; `about` says in words what it shows."""

    name: str
    about: str
    svg: str


Arms = Sequence[tuple[str, Summary]]


def draw_plots(arms: Arms, out_dir: Path) -> list[Plot]:
    """Draw every plot that has data, write `out_dir/<name>.png` for each, and return them as SVG."""
    styles = _styles([name for name, _ in arms])
    drawn = []
    for name, about, draw in (
        ("ttft_by_turn", "Time to first token by turn", _ttft),
        ("hit_rate_by_turn", "Hit rate by turn", _hit_rate),
        ("wall_and_decode", "Wall time and decode rate", _bars),
    ):
        png = out_dir / f"{name}.png"
        with rc_context(_rc("#1f2328", name)):
            figure = draw(arms, styles)
            if figure is None:
                png.unlink(missing_ok=True)
                continue
            figure.savefig(png, dpi=160, facecolor="white")
        with rc_context(_rc(INK, name)):
            drawn.append(Plot(name, about, _svg(draw(arms, styles), name)))
    return drawn


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker per arm; a repeated arm ("in-page (2)") and an unknown one take a spare style."""
    spare = iter(OTHER_STYLES * (len(names) // len(OTHER_STYLES) + 1))
    return {name: ARM_STYLE.get(name) or next(spare) for name in names}


def _rc(ink: str, salt: str) -> dict[str, Any]:
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(colours, ink),
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": ink,
        "grid.alpha": 0.13,
        "axes.linewidth": 0.8,
        "lines.linewidth": 2,
        "lines.markersize": 5,
        "svg.fonttype": "path",
        "svg.hashsalt": salt,
    }


def _line_axes(arms: Arms, title: str, ylabel: str) -> tuple[Any, Any]:
    longest = max((summary.by_turn for _, summary in arms), key=len)
    prompts = [t.prompt_tokens for t in longest if t.prompt_tokens]
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel("turn" + (f" (prompt of {prompts[0]:,.0f} to {prompts[-1]:,.0f} tokens)" if prompts else ""))
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    return figure, axes


def _legend(figure: Any, axes: Any) -> None:
    """Outside the axes, so that it never covers a point."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if sum(map(len, labels)) > 48 else 6
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)


def _span(turns: Sequence[int]) -> tuple[float, float]:
    return min(turns) - 0.5, max(turns) + 0.5


def _ttft(arms: Arms, styles: dict[str, tuple[str, str]]) -> Any | None:
    points = {name: [t for t in summary.by_turn if t.ttft_s] for name, summary in arms}
    if not any(points.values()):
        return None
    figure, axes = _line_axes(arms, "Time to first token, by turn", "TTFT, mean and p10–p90 band (s)")
    for name, turns in points.items():
        colour, marker = styles[name]
        x = [t.turn for t in turns]
        axes.plot(x, [sum(t.ttft_s) / len(t.ttft_s) for t in turns], color=colour, marker=marker, label=name)
        low, high = ([percentile(t.ttft_s, p) for t in turns] for p in (10, 90))
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(*_span([t.turn for turns in points.values() for t in turns]))
    _legend(figure, axes)
    return figure


def _hit_rate(arms: Arms, styles: dict[str, tuple[str, str]]) -> Any | None:
    points = {name: [t for t in s.by_turn if t.hit_rate is not None] for name, s in arms}
    if not any(points.values()):
        return None
    figure, axes = _line_axes(arms, "Hit rate, by turn", "cached / prompt tokens")
    longest = max((summary.by_turn for _, summary in arms), key=len)
    prompts = [(t.turn, t.prompt_tokens) for t in longest if t.prompt_tokens]
    seen = [(turn, before / now) for (_, before), (turn, now) in pairwise(prompts)]
    if seen:
        axes.plot(
            *zip(*seen, strict=True),
            color=axes.xaxis.label.get_color(),
            linestyle=":",
            linewidth=1.4,
            alpha=0.7,
            label="ceiling (all of the turn before)",
        )
    for name, turns in points.items():
        colour, marker = styles[name]
        x, y = [t.turn for t in turns], [t.hit_rate for t in turns]
        label = name if turns else f"{name} (not reported)"
        axes.plot(x, y, color=colour, marker=marker, label=label, clip_on=not turns)
    axes.set_ylim(0, 1)
    axes.set_xlim(*_span([t.turn for turns in points.values() for t in turns]))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _legend(figure, axes)
    return figure


def _bars(arms: Arms, styles: dict[str, tuple[str, str]]) -> Any | None:
    panels: list[tuple[str, str, list[float | None]]] = [
        ("Wall, all sessions", "s", [summary.wall_s for _, summary in arms]),
        ("TTFT, later turns", "mean (s)", [s.ttft_later.mean if s.ttft_later else None for _, s in arms]),
        ("Decode, per stream", "mean (tokens/s)", [s.decode_tok_s.mean if s.decode_tok_s else None for _, s in arms]),
    ]
    panels = [panel for panel in panels if any(value is not None for value in panel[2])]
    names = [name for name, _ in arms]
    engine = ConstrainedLayoutEngine(w_pad=0.12)
    figure = Figure(figsize=(3.1 * len(panels), 1.35 + 0.42 * len(arms)), layout=engine)
    for axes, (title, unit, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        places = range(len(arms))
        axes.barh(places, [value or 0 for value in values], color=[styles[n][0] for n in names], height=0.62)
        most = max(value or 0 for value in values) or 1.0
        for place, value in zip(places, values, strict=True):
            text = "not reported" if value is None else number(value)
            axes.text((value or 0) + 0.02 * most, place, text, va="center", fontsize=9)
        axes.set_xlim(0, 1.28 * most)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.set_title(title)
        axes.set_xlabel(unit)
        axes.set_yticks(places, names if axes is figure.axes[0] else [""] * len(names))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
    return figure


def _svg(figure: Any, name: str) -> str:
    """The figure as an SVG element for inlining: no prolog, no addresses, ids of its own, the page's text colour."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg))
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor")
