"""A HAProxy configuration for replicas that cache, as text; every line that is not obvious carries its reason.

How a replica is chosen:

`affinity`     a consistent hash of the session header, whatever the load
`bounded`      the replica that has the session, while it has a sequence free; otherwise (a new session, or a busy
               replica) the same hash with bounded load: a replica with more than its share is passed over. Once a
               replica is full, the one with the fewest requests
`round-robin`  each in turn, whatever the session: what caching loses without a router that knows sessions

Three things about HAProxy's bounded load (`hash-balance-factor`) shape `bounded`; the tests of routing show them on
the real one. The bound is a share of what runs, not a number of sequences: with two replicas and 150% the second
request at once may already have to leave a replica that has room, and then pays for a cold prompt. Hence the table
that remembers where a session was: known sessions are not measured against the bound, and it can be tight. And
requests that wait in HAProxy's own queue do not count as running: a limit of exactly the replica's sequences
freezes the shares when it is reached, and the rest of a burst queues in front of the full replica while others
idle. Hence a limit above the sequences: what is too much waits in vLLM, where it counts. And the bound is rounded up to
whole requests, at any percentage: of twelve of one home it leaves seven there, three of them waiting behind four that
generate, while the other replica has sequences free. Hence the fewest requests, once a replica is full.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal, get_args
from urllib.parse import urlsplit

from inpage.errors import ConfigError

Policy = Literal["affinity", "bounded", "round-robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
REPLICA_HEADER = "x-replica"
"""Answers carry the name of the replica that gave them in this header."""
MANY = 1_000_000
"""More requests than any replica has."""

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets; empty or `*` for all) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Routes:
    """What the configuration says.

    replicas: their addresses. sequences: requests a replica runs at once (`--max-num-seqs`). Of policy `bounded`:
    bound is the percent of the average that one replica may run, remember_s how many seconds after its last
    request a session's replica is known, 0 for never. silence_s: seconds without a byte after which a request is
    given up; a cold prompt is silent until its first token. stats: where the page and the metrics are served, None
    for nowhere. Raises `ConfigError` for values that cannot work.
    """

    replicas: tuple[Address, ...]
    policy: Policy = "bounded"
    sequences: int = 4
    session_header: str = "x-session-id"
    bound: int = 110
    remember_s: int = 3600
    bind: Address = Address("", 8080)
    stats: Address | None = None
    silence_s: int = 600

    def __post_init__(self) -> None:
        twice = sorted({str(replica) for replica in self.replicas if self.replicas.count(replica) > 1})
        count = len(self.replicas)
        for wrong, why in (
            (self.policy not in POLICIES, f"--policy {self.policy} is not one of {', '.join(POLICIES)}"),
            (count == 0, "there is no replica: give the address of each, such as http://10.0.0.1:8000"),
            (bool(twice), f"{', '.join(twice)} is given more than once: a replica would get two shares"),
            (self.sequences < 1, f"--sequences is {self.sequences}: a replica runs at least one (--max-num-seqs)"),
            (self.remember_s < 0, f"--remember is {self.remember_s}: seconds, or 0 for not at all"),
            (self.silence_s < 1, f"--silence is {self.silence_s}: it must be at least one second"),
            (
                _TOKEN.fullmatch(self.session_header) is None,
                f"--session-header is {self.session_header!r}: not the name of an HTTP header",
            ),
            (not 100 < self.bound <= 1000, f"--bound is {self.bound}: percent of the average, from 101 to 1000"),
            (
                self.policy == "bounded" and count > 1 and self.bound >= 100 * count,
                f"--bound is {self.bound}: one of {count} replicas may then run all that there is, and nothing is ever "
                f"passed over; give less than {100 * count}",
            ),
        ):
            if wrong:
                raise ConfigError(why)

    @property
    def maxconn(self) -> int:
        """Requests that HAProxy lets a replica have at once; beyond them it queues.

        For `bounded` as many may wait in vLLM as run there: a guard against overload that shares never reach before.
        """
        return self.sequences * (2 if self.policy == "bounded" else 1)


def parse_replica(url: str) -> Address:
    """The address in a replica's URL; raises `ConfigError` for what HAProxy would not reach.

    A path is refused rather than dropped, except the `/v1` that OpenAI clients want in a base URL.
    """
    parts = urlsplit(url.strip())
    if parts.scheme != "http":
        raise ConfigError(f"{url!r} is not the HTTP address of a replica; give one like http://10.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment or parts.path.rstrip("/") not in ("", "/v1"):
        raise ConfigError(f"{url!r}: only host and port of a replica can be routed to; leave out the rest")
    return _address(parts.netloc, default_port=80, source=url)


def parse_address(text: str) -> Address:
    """`HOST:PORT`, `*:PORT` or `:PORT`; raises `ConfigError`."""
    return _address(text.strip(), default_port=None, source=text)


def _address(netloc: str, default_port: int | None, source: str) -> Address:
    try:
        parts = urlsplit(f"//{netloc}")
        host, port = parts.hostname or "", parts.port if parts.port is not None else default_port
    except ValueError as error:
        raise ConfigError(f"{source!r} is not an address: {error}") from error
    if "@" in netloc:
        raise ConfigError(f"{source!r}: leave out user name and password")
    if port is None or port < 1:
        raise ConfigError(f"{source!r} has no port; write it like 127.0.0.1:8080")
    anywhere = host in ("", "*") and default_port is None
    if not anywhere and not _is_ip(host) and _HOST.fullmatch(host) is None:
        raise ConfigError(f"{source!r} has no usable host; write it like http://10.0.0.1:8000")
    return Address(host, port)


def _is_ip(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def render(routes: Routes) -> str:
    """The configuration file, for HAProxy 2.4 or later."""
    sections = [_head(routes), _defaults(routes), _frontend(routes), _backend(routes)]
    if routes.stats is not None:
        sections.append(_stats(routes.stats))
    return "\n\n".join(sections) + "\n"


def _head(routes: Routes) -> str:
    count = len(routes.replicas)
    return f"""\
# Written by `inpage route-config`: {count} replicas of {routes.sequences} sequences, policy {routes.policy}.
# Check it with `haproxy -c -f FILE`.

global
    log stdout format raw daemon info"""


def _defaults(routes: Routes) -> str:
    return f"""\
defaults
    mode http
    log global
    option httplog
    option dontlognull
    timeout connect 5s
    timeout http-request 30s
    timeout http-keep-alive 60s
    # The longest silence: a cold prompt until its first token, or a request waiting for a free sequence.
    timeout server {routes.silence_s}s
    timeout client {routes.silence_s}s
    timeout queue {routes.silence_s}s
    # Tokens leave as they come.
    option http-no-delay
    # A client that is gone frees its place, in the queue and in the replica.
    option abortonclose
    # Only what no replica has seen is sent again: a generation is not repeated.
    retries 2
    retry-on conn-failure
    option redispatch 1"""


def _frontend(routes: Routes) -> str:
    bind = str(routes.bind) if routes.bind.host else f":{routes.bind.port}"
    return f"""\
frontend api
    bind {bind}
    default_backend replicas"""


def _backend(routes: Routes) -> str:
    servers = [f"    server r{i} {replica} id {i}" for i, replica in enumerate(routes.replicas, start=1)]
    lines = [
        "backend replicas",
        *_balance(routes),
        "    option httpchk",
        "    http-check send meth GET uri /health",
        "    http-check expect status 200",
        "    timeout check 10s",
        f"    http-response set-header {REPLICA_HEADER} %s",
        f"    default-server maxconn {routes.maxconn} check inter 2s fall 3 rise 2",
        "    # The hash goes by id: a replica that is replaced keeps its number, a new one takes the next.",
        *servers,
    ]
    return "\n".join(lines)


def _balance(routes: Routes) -> list[str]:
    if routes.policy == "round-robin":
        return ["    balance roundrobin"]
    session = f"hdr({routes.session_header})"
    lines = [
        "    # A session goes where its cache is. Requests without the header go to each replica in turn.",
        f"    balance {session}",
        "    hash-type consistent sdbm avalanche",
    ]
    if routes.policy == "affinity":
        return lines
    lines += [
        f"    # A replica that runs more than {routes.bound}% of the average is passed over for the next on the ring.",
        f"    hash-balance-factor {routes.bound}",
    ]
    stays: list[str] = []
    if routes.remember_s:
        lines += [
            "    # A session that is known stays where it was while that replica has a sequence free, bound or not.",
            f"    stick-table type string len 24 size 100k expire {routes.remember_s}s",
        ]
        key = f"{session},xxh64"  # names may be longer than a table's key, and alike at their beginnings
        for number in range(1, len(routes.replicas) + 1):
            was_here = f"{key},table_server_id(replicas) -m int {number}"
            has_room = f"srv_conn(replicas/r{number}) lt {routes.sequences}"
            lines.append(f"    stick match {key} if {{ {was_here} }} {{ {has_room} }}")
            stays.append(f"    http-request set-var(txn.stays) int(1) if {{ {was_here} }} {{ {has_room} }}")
        lines.append(f"    stick store-request {key}")
    lines += [*stays, *_fewest(routes)]
    lines.append(
        "    # maxconn is twice the sequences: what queues in HAProxy is no load to the bound, what waits in vLLM is."
    )
    return lines


def _fewest(routes: Routes) -> list[str]:
    """Who does not stay goes to the replica with the fewest requests, once one is full; the first among equals."""
    numbers = range(1, len(routes.replicas) + 1)
    lines = ["    # Once a replica is full, a session that does not stay goes where the fewest requests are."]
    for n in numbers:
        lines.append(f"    http-request set-var(txn.r{n}) srv_conn(replicas/r{n})")
        lines.append(f"    http-request set-var(txn.full) int(1) if {{ var(txn.r{n}) -m int ge {routes.sequences} }}")
    lines.append("    # A replica that is down has no requests, and is not the one meant.")
    lines.append(f"    http-request set-var(txn.fewest) int({MANY})")
    lines += [
        f"    http-request set-var(txn.fewest) var(txn.r{n}) if {{ srv_is_up(replicas/r{n}) }} "
        f"{{ var(txn.r{n}),sub(txn.fewest) -m int lt 0 }}"
        for n in numbers
    ]
    moves = "!{ var(txn.stays) -m found } { var(txn.full) -m found }"
    lines += [f"    use-server r{n} if {moves} {{ var(txn.r{n}),sub(txn.fewest) -m int eq 0 }}" for n in numbers]
    return lines


def _stats(stats: Address) -> str:
    bind = str(stats) if stats.host else f":{stats.port}"
    return f"""\
frontend stats
    bind {bind}
    option dontlog-normal
    http-request use-service prometheus-exporter if {{ path /metrics }}
    stats enable
    stats uri /"""
