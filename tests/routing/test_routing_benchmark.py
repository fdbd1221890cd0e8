"""What the benchmark makes of its figures; the servers are in test_routing_servers.py."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.routing import Figures, plot, table, verdicts, went
from rich.console import Console

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


def test_requests_are_counted_by_replica_from_haproxys_own_log(tmp_path) -> None:
    log = tmp_path / "haproxy.log"
    line = (
        '127.0.0.1:1 [x] api replicas/{} 0/0/0/1/1 200 100 - - ---- 1/1/0/0/0 0/0 "{} /v1/chat/completions HTTP/1.1"\n'
    )
    log.write_text("".join(line.format(*each) for each in (("r1", "POST"), ("r2", "POST"), ("r1", "GET"))))
    assert went(log, 0, 2) == {"r1": 1, "r2": 1}
