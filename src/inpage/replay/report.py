"""A self-contained HTML page about one or several arms, with its plots beside it as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from inpage import __version__
from inpage.replay.compare import Comparison, compare, gain_text, number
from inpage.replay.result import DEFINITIONS, ArmResult

if TYPE_CHECKING:
    from inpage.replay.plots import Plot

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #fff;
  --card: #f6f8fa; --good: #1a7f37; --warn: #9a6700; --warn-back: #fff8c5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --back: #0d1117; --card: #151b23; --good: #3fb950; --warn: #d29922; --warn-back: #272115; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--back);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
p, dl { max-width: 46rem; }
.sub { color: var(--soft); margin: 0 0 1.2rem; }
.warn { border-left: 4px solid var(--warn); background: var(--warn-back); border-radius: 4px;
  padding: .6rem 1rem; margin: 1rem 0; overflow-wrap: anywhere; }
.warn p { margin: .25rem 0; max-width: none; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .32rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: .2rem; }
thead th { border-bottom: 2px solid var(--line); }
tr.end td { border-bottom: 1px solid var(--line); }
td small { display: block; color: var(--good); line-height: 1.2; }
table.text td { text-align: left; white-space: normal; border-bottom: 1px solid var(--line); }
table.text th { text-align: left; }
figure { margin: 1.2rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; max-width: 50rem; margin: 0 auto; color: var(--ink); }
summary { cursor: pointer; color: var(--soft); }
code { font-size: .88em; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Section:
    """A part that the caller adds: paragraphs (a blank line between two) and perhaps a table (headers, rows)."""

    heading: str
    text: str
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None


def write_report(results: Sequence[ArmResult], out_dir: Path, *, title: str, sections: Sequence[Section] = ()) -> Path:
    """Write `out_dir/report.html` and the plots as PNG beside it; returns the page's path.

    The first result is the base of the ratios. `sections` come after the table and the plots. Raises
    `ConfigError` when there is no result.
    """
    from inpage.replay.plots import draw_plots  # a second of imports that only a report needs

    comparison = compare(results)
    out_dir.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(list(zip(comparison.labels, comparison.summaries, strict=True)), out_dir)
    page = out_dir / "report.html"
    page.write_text(_page(results, comparison, plots, title, sections), encoding="utf-8")
    return page


def _page(
    results: Sequence[ArmResult], comparison: Comparison, plots: Sequence[Plot], title: str, sections: Sequence[Section]
) -> str:
    base = results[0]
    days = sorted({result.started_at[:10] for result in results})
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(base.model)} · {escape(" to ".join(dict.fromkeys((days[0], days[-1]))))} · '
        f"inpage {escape(base.inpage_version or __version__)}</p>",
        _warning_box(comparison.warnings),
        "<h2>What was run</h2>",
        _facts(_settings(base)),
        "<h2>Arms side by side</h2>",
        _comparison_table(comparison),
    ]
    if len(results) > 1:
        parts.append(f'<p class="sub">Ratios are against {escape(comparison.labels[0])}.</p>')
    parts += [f'<figure role="img" aria-label="{escape(plot.about)}">{plot.svg}</figure>' for plot in plots]
    for section in sections:
        parts.append(f"<h2>{escape(section.heading)}</h2>")
        parts += [f"<p>{escape(text)}</p>" for text in section.text.split("\n\n") if text.strip()]
        if section.table is not None:
            parts.append(_table(*section.table))
    parts += ["<h2>Turn by turn</h2>", *_by_turn(comparison)]
    parts += ["<h2>Servers</h2>", _servers(results, comparison.labels)]
    parts += ["<h2>Definitions</h2>", _facts(DEFINITIONS)]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _settings(result: ArmResult) -> list[tuple[str, str]]:
    spec = result.settings
    return [
        ("Sessions", f"{spec.sessions} at once, {spec.turns} turns each, seed {spec.seed}"),
        ("Prompt", f"{spec.start_tokens:,} tokens at turn 1, {spec.prompt_tokens(spec.turns):,} at the last"),
        ("Shared by all sessions", f"{spec.system_tokens:,} tokens of system prompt and tools"),
        ("New tokens a turn", f"{spec.new_tokens:,}"),
        ("Generated a turn", f"{spec.output_tokens:,} tokens, greedy" + (" (at most)" if result.plain else "")),
        ("Warm-up", "one untimed session of other text" if result.warmup else "none"),
    ]


def _servers(results: Sequence[ArmResult], labels: Sequence[str]) -> str:
    rows = [
        [
            label,
            result.server_version or "not reported",
            f"{result.max_model_len:,}" if result.max_model_len else "not reported",
            result.base_url,
            result.started_at,
            result.transcript_digest[:12],
        ]
        for label, result in zip(labels, results, strict=True)
    ]
    return _table(["arm", "server version", "max_model_len", "address", "started (UTC)", "transcripts"], rows)


def _comparison_table(comparison: Comparison) -> str:
    head = "".join(f"<th>{escape(label)}</th>" for label in ("", *comparison.labels))
    rows = []
    for row in comparison.rows:
        cells = "".join(
            f"<td>{escape(value)}{f'<small>{gain_text(gain, row.better)}</small>' if gain else ''}</td>"
            for value, gain in row.cells
        )
        ends = ' class="end"' if row.ends_group else ""
        rows.append(f"<tr{ends}><td>{escape(row.label)}</td>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _by_turn(comparison: Comparison) -> list[str]:
    parts = []
    for label, summary in zip(comparison.labels, comparison.summaries, strict=True):
        rows = [
            [
                str(turn.turn),
                "–" if turn.prompt_tokens is None else f"{turn.prompt_tokens:,.0f}",
                "not reported" if turn.cached_tokens is None else f"{turn.cached_tokens:,.0f}",
                "not reported" if turn.hit_rate is None else f"{turn.hit_rate:.1%}",
                number(sum(turn.ttft_s) / len(turn.ttft_s)) if turn.ttft_s else "–",
            ]
            for turn in summary.by_turn
        ]
        table = _table(["turn", "prompt tokens", "cached tokens", "hit rate", "TTFT mean (s)"], rows, kind="numbers")
        parts.append(f"<details><summary>{escape(label)}</summary>{table}</details>")
    return parts


def _warning_box(warnings: Sequence[str]) -> str:
    lines = "".join(f"<p>{escape(warning)}</p>" for warning in warnings)
    return f'<div class="warn" role="note">{lines}</div>' if lines else ""


def _facts(pairs: Sequence[tuple[str, str]]) -> str:
    return '<dl class="facts">' + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs) + "</dl>"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "text") -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
