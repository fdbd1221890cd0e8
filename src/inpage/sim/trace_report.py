"""The trace study as a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from inpage.errors import ConfigError
from inpage.layout.units import mib
from inpage.sim.arms import Figures

COLORS = {"off": "#8c8c8c", "per-block": "#c44e52", "in-page": "#2a6f97"}
BOUNDED_COLORS = ("#dd8452", "#937860", "#da8bc3")


def table(figures: Sequence[Figures], block_tokens: int) -> Table:
    """One row an arm and memory size."""
    made = Table("memory", "arm", box=None, padding=(0, 2, 0, 0))
    headings = (
        "pool tokens",
        "hit rate",
        "prefill left",
        "a turn p50",
        "preempted",
        "evicted",
        "warm",
        "later TTFT p50",
        "mean",
    )
    for heading in (*headings, "wall", "refused"):
        made.add_column(heading, justify="right")
    before = None
    for one in figures:
        plain = one.as_json()
        ttft, prefill = plain["later_turn_ttft"], plain["later_turn_prefill"]
        made.add_row(
            mib(one.arm.memory_bytes) if one.arm.memory_bytes != before else "",
            one.arm.name,
            f"{(one.arm.num_blocks - 1) * block_tokens:,}",
            "none" if one.hit_rate is None else f"{one.hit_rate:.1%}",
            f"{one.prefill_tokens / 1e6:,.2f} M",
            f"{prefill['p50']:,}" if prefill else "none",
            f"{one.preemptions:,}",
            f"{one.evictions:,}",
            f"{one.warm_sessions}/{one.sessions}",
            f"{ttft['p50']:,.1f} s" if ttft else "none",
            f"{ttft['mean']:,.1f} s" if ttft else "none",
            f"{one.wall / 3600:,.2f} h",
            f"{one.refused:,}",
        )
        before = one.arm.memory_bytes
    return made


def plot(figures: Sequence[Figures], path: Path, title: str) -> None:
    """Hit rate against memory, one line a layout; raises `ConfigError` when the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    names = list(dict.fromkeys(one.arm.name for one in figures))
    bounded = [name for name in names if name not in COLORS]
    for name in names:
        points = [(one.arm.memory_bytes / 2**30, 100 * (one.hit_rate or 0)) for one in figures if one.arm.name == name]
        color = COLORS.get(name) or BOUNDED_COLORS[bounded.index(name) % len(BOUNDED_COLORS)]
        width = 2.4 if name == "in-page" else 1.6
        axes.plot(*zip(*points, strict=True), marker="o", color=color, linewidth=width, label=name)
    axes.set_xlabel("memory of the pool, GiB")
    axes.set_ylabel("prompt tokens from the cache, %")
    axes.set_ylim(-2, 100)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
    finally:
        pyplot.close(figure)
