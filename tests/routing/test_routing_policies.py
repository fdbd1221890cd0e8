"""What real HAProxy does with the written configurations; replicas are doubles that hold their requests.

Affinity, the bound and the limits are about which replica a request reaches while others run, which doubles show
exactly; tests/routing/test_routing_servers.py has real servers.
"""

from __future__ import annotations

import time

import httpx
import pytest

from inpage.demo.server import free_port
from inpage.routing import haproxy_config
from inpage.routing.haproxy import running_haproxy
from inpage.routing.haproxy_config import Routes, parse_address, parse_replica, render


def fill(router, names: list[str], arrive: int | None = None) -> list[list[int]]:
    """Begin requests one after another; the arrivals of each replica after each.

    Only the first `arrive` are expected to reach a replica; the others are begun together, and one that does come is
    seen if it comes within a second.
    """
    for replica in router.replicas:
        replica.hold()
    seen = []
    arrive = len(names) if arrive is None else arrive
    for number, name in enumerate(names[:arrive], start=1):
        router.begin(name)
        seen.append(router.settled(number))
    for name in names[arrive:]:
        router.begin(name)
    seen.append(router.settled(len(names), quiet_s=1.0))
    return seen


def take_down_r1(router, names: list[str]) -> None:
    """The first replica fails its checks until none of these sessions, some of which must be its own, reach it."""
    router.replicas[0].healthy = False
    deadline = time.monotonic() + 20
    while "r1" in {router.ask(name) for name in names} and time.monotonic() < deadline:
        time.sleep(0.2)


def test_a_session_goes_to_one_replica_and_sessions_are_spread(route) -> None:
    with route("affinity") as router:
        asked = {name: {router.ask(name) for _ in range(3)} for name in (f"session-{i}" for i in range(32))}
        assert all(len(replicas) == 1 for replicas in asked.values())
        assert {next(iter(replicas)) for replicas in asked.values()} == {"r1", "r2"}


def test_affinity_queues_a_burst_behind_the_full_replica_while_the_other_idles(route) -> None:
    with route("affinity") as router:
        burst = router.sessions_of("r1", 10)
        assert fill(router, burst, arrive=4)[-1] == [4, 0]


def test_bounded_load_shares_a_burst_of_new_sessions_however_they_hash(route) -> None:
    with route("bounded") as router:
        hashed = [f"session-{i}" for i in range(64)]
        home = [name for name in hashed if router.ask(name) == "r1"]
        assert len(home) >= 12
    # A router that has not seen them: the hash is the same, nothing is remembered.
    with route("bounded") as router:
        seen = fill(router, home[:12])
        assert seen[7] == [4, 4]  # every sequence is taken before anything waits
        assert seen[-1] == [6, 6]  # and what waits does so in the replicas, not in HAProxy


@pytest.mark.parametrize(("fewest", "shares"), [(True, [6, 6]), (False, [7, 5])])
def test_a_burst_behind_a_full_replica_goes_where_the_fewest_requests_are(route, monkeypatch, fewest, shares) -> None:
    """The bound alone rounds up: at any percentage it leaves three of eight waiting behind four that generate."""
    if not fewest:
        monkeypatch.setattr(haproxy_config, "_fewest", lambda routes: [])
    with route("bounded") as router:
        known = router.sessions_of("r1", 4)
        names = (f"new-{number}" for number in range(400))
        with route("affinity") as other:
            new = [name for name in names if other.ask(name) == "r1"][:8]
        assert fill(router, [*known, *new])[-1] == shares


def test_a_replica_that_is_down_is_not_the_one_with_the_fewest_requests(route) -> None:
    names = [f"session-{i}" for i in range(64)]
    with route("bounded", replicas=3) as router:
        take_down_r1(router, names)
        known = [name for name in names if router.ask(name) == "r2"][:4]
        router.forget()
        new = [f"{name}-new" for name in names[:8]]
        assert len(known) == 4
        assert fill(router, [*known, *new])[-1] == [0, 6, 6]


def test_a_known_session_stays_while_its_replica_has_room_and_leaves_when_it_has_none(route) -> None:
    with route("bounded") as router:
        home = router.sessions_of("r1", 8)
        seen = fill(router, home)
        assert seen[:4] == [[1, 0], [2, 0], [3, 0], [4, 0]]
        assert seen[4:8] == [[4, 1], [4, 2], [4, 3], [4, 4]]


def test_a_session_that_had_to_leave_is_remembered_where_its_cache_is_now(route) -> None:
    with route("bounded") as router:
        home = router.sessions_of("r1", 5)
        fill(router, home)
        for replica in router.replicas:
            replica.let_go()
        deadline = time.monotonic() + 20
        while sum(replica.running for replica in router.replicas) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [router.ask(name) for name in home] == ["r1"] * 4 + ["r2"]


def test_long_session_names_that_begin_alike_are_told_apart(route) -> None:
    with route("bounded") as router:
        names = [f"{'session' * 100}-{i}" for i in range(16)]
        asked = [router.ask(name) for name in names]
        assert set(asked) == {"r1", "r2"}
        assert [router.ask(name) for name in names] == asked


def test_without_memory_the_bound_sends_the_second_request_away_from_a_replica_with_room(route) -> None:
    """Why `bounded` remembers: HAProxy's bound is a share of what runs, not a number of sequences."""
    with route("bounded", remember_s=0, bound=150) as router:
        assert fill(router, router.sessions_of("r1", 2))[-1] == [1, 1]


def test_a_limit_of_exactly_the_sequences_would_freeze_the_shares(haproxy, route, monkeypatch) -> None:
    """Why maxconn is above the sequences: what queues in HAProxy is not load, so the full replica stays chosen."""
    monkeypatch.setattr(haproxy_config, "_fewest", lambda routes: [])
    monkeypatch.setattr(Routes, "maxconn", property(lambda routes: routes.sequences))
    with route("bounded", remember_s=0, bound=150) as router:
        assert fill(router, router.sessions_of("r1", 12), arrive=6)[-1] == [4, 2]


@pytest.mark.parametrize("policy", ["affinity", "bounded"])
def test_requests_without_the_header_are_shared_equally(route, policy) -> None:
    """HAProxy then walks its ring, which is in turn over a whole round of 16 places a replica."""
    with route(policy) as router:
        asked = [router.ask(None) for _ in range(64)]
        assert abs(asked.count("r1") - 32) <= 1


def test_round_robin_scatters_a_session(route) -> None:
    with route("round-robin") as router:
        assert {router.ask("session") for _ in range(4)} == {"r1", "r2"}


@pytest.mark.parametrize("policy", ["affinity", "bounded"])
def test_only_the_sessions_of_a_replica_that_fails_its_checks_move(route, policy) -> None:
    names = [f"session-{i}" for i in range(24)]
    with route(policy, replicas=3) as router:
        before = {name: router.ask(name) for name in names}
        take_down_r1(router, names)
        during = {name: router.ask(name) for name in names}
        assert "r1" not in during.values()
        assert {name for name in names if during[name] != before[name]} == {n for n in names if before[n] == "r1"}


def test_stats_and_prometheus_metrics_are_served_where_asked(haproxy, replica, tmp_path) -> None:
    bind, stats = (parse_address(f"127.0.0.1:{free_port()}") for _ in range(2))
    text = render(Routes((parse_replica(replica.url),), "affinity", bind=bind, stats=stats))
    with running_haproxy(text, f"http://{bind}", tmp_path / "haproxy.log"):
        assert "haproxy_server_current_sessions" in httpx.get(f"http://{stats}/metrics").text
        assert "r1" in httpx.get(f"http://{stats}/").text
