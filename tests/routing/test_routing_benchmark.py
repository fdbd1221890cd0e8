"""What the benchmark makes of its figures; the servers are in test_routing_servers.py."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from benchmarks.routing import Figures, answered, plot, router, table, verdicts
from rich.console import Console

from inpage.demo.server import RunningServer
from inpage.replay.result import TurnRecord


def figures(policy: str, cached: int, burst: float | None) -> dict:
    turn = TurnRecord(session=0, turn=2, prompt_tokens=100, cached_tokens=cached, ttft_s=1.0, total_s=2.0)
    one = Figures(policy, [turn], [10.0])
    if burst is not None:
        disturbed = [9.0, 99.0]
        one.bursts = {"one_home": [[burst, burst], disturbed, [burst, burst]], "dealt": [[1.0]]}
        one.shares = {"one_home": Counter(r1=12), "dealt": Counter(r1=6, r2=6)}
    return one.summary()


@pytest.mark.parametrize(
    ("bounded_cached", "bounded_burst", "holds"),
    [(80, 2.0, [True, True, True]), (78, 2.0, [True, False, True]), (80, 2.1, [True, True, False])],
)
def test_the_verdicts_are_about_hits_kept_and_bursts_shortened(bounded_cached, bounded_burst, holds) -> None:
    """One burst that the machine disturbed does not decide: the median of the bursts does."""
    summaries = [
        figures("one replica", 80, None),
        figures("affinity", 80, 3.0),
        figures("bounded", bounded_cached, bounded_burst),
    ]
    assert [held for held, _ in verdicts(summaries)] == holds


def test_the_figures_are_shown_and_plotted(tmp_path) -> None:
    summaries = [figures("one replica", 80, None), figures("affinity", 80, 3.0), figures("bounded", 80, 2.0)]
    console = Console(record=True, width=160)
    console.print(table(summaries))
    assert "80.0%" in console.export_text()
    plot(summaries, tmp_path / "routing.png")
    assert (tmp_path / "routing.png").stat().st_size > 1000


def test_every_answer_is_counted_even_when_many_end_at_once(haproxy, replica, tmp_path) -> None:
    """HAProxy's log would not do: two threads that write at once lose a line."""
    server = RunningServer(replica.url, tmp_path / "log", pid=0)
    with router("affinity", [server], tmp_path) as through, ThreadPoolExecutor(8) as pool:
        before = answered(through)
        with httpx.Client() as http:
            list(pool.map(lambda _: http.post(through.url, content=b"{}").raise_for_status(), range(400)))
        assert answered(through) - before == {"r1": 400}
