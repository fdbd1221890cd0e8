"""Real HAProxy in front of two real in-page servers: hits are kept, a burst is spilled."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.routing import BLOCKS, BURST, BUSY, burst, empty_caches, homes, replicas, router

from inpage.replay.result import summarize
from inpage.replay.runner import replay_arm
from inpage.replay.sessions import SessionSpec

pytestmark = pytest.mark.engine

SESSIONS = SessionSpec(
    # An odd number: round robin would send sessions that keep in step to the same of two replicas every time.
    sessions=5,
    start_tokens=2048,
    end_tokens=5120,
    new_tokens=1024,
    output_tokens=8,
    system_tokens=1536,
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with replicas(tmp_path_factory.mktemp("replicas")) as running:
        yield running


def later_hit_rate(url: str, servers) -> float:
    empty_caches(servers)
    result = replay_arm(url, SESSIONS, arm="arm")
    assert result.complete, [turn.error for turn in result.turns if turn.error]
    rate = summarize(result).hit_rate_later
    assert rate is not None
    return rate


@pytest.fixture(scope="module")
def one_replica(servers) -> float:
    return later_hit_rate(servers[0].url, servers)


@pytest.mark.parametrize("policy", ["affinity", "bounded"])
def test_two_replicas_hit_as_often_as_one(haproxy, servers, one_replica, tmp_path, policy) -> None:
    assert one_replica > 0.6
    with router(policy, servers, tmp_path) as through:
        assert later_hit_rate(through.url, servers) == pytest.approx(one_replica, rel=0.02)


def test_round_robin_does_not(haproxy, servers, one_replica, tmp_path) -> None:
    with router("round-robin", servers, tmp_path) as through:
        assert later_hit_rate(through.url, servers) < 0.95 * one_replica


def test_a_burst_behind_a_busy_replica_is_spilled_under_bounded_load_and_not_under_affinity(
    haproxy, servers, tmp_path
) -> None:
    names = homes(servers, tmp_path, BUSY + BURST)
    shares = {}
    for policy in ("affinity", "bounded"):
        empty_caches(servers)
        with router(policy, servers, tmp_path) as through:
            times, shares[policy] = asyncio.run(burst(through, names))
        assert len(times) == BURST
    assert shares["affinity"] == {"r1": BUSY + BURST}
    assert shares["bounded"]["r2"] >= (BUSY + BURST) // 3
    assert sum(shares["bounded"].values()) == BUSY + BURST


def test_the_pool_of_a_replica_holds_what_is_replayed(servers) -> None:
    blocks = SESSIONS.sessions * (SESSIONS.end_tokens // 256 + 2 * 3)
    assert blocks < BLOCKS
