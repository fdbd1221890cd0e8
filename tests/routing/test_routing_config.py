"""`inpage route-config`: what it writes, what HAProxy says to it, what it refuses."""

from __future__ import annotations

import re
import subprocess

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.errors import ConfigError
from inpage.routing.haproxy_config import POLICIES, Routes, parse_address, parse_replica, render

TWO = (parse_replica("http://10.0.0.1:8000"), parse_replica("http://10.0.0.2:8000/v1"))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["route-config", *arguments])
    if result.exception:
        raise result.exception
    return result.output


@pytest.mark.parametrize("stats", [None, parse_address(":8404")])
@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_haproxy_accepts_every_policy_without_a_warning(haproxy, tmp_path, policy, replicas, stats) -> None:
    addresses = tuple(parse_replica(f"http://127.0.0.1:{8000 + i}") for i in range(replicas))
    file = tmp_path / "haproxy.cfg"
    file.write_text(render(Routes(addresses, policy, bind=parse_address("127.0.0.1:8080"), stats=stats)))
    checked = subprocess.run([haproxy, "-c", "-f", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "[WARNING]" not in checked.stderr + checked.stdout


def test_haproxy_accepts_ipv6_and_check_says_so(haproxy, tmp_path) -> None:
    out = tmp_path / "haproxy.cfg"
    run("http://[::1]:8000", "http://127.0.0.1:8001", "--bind", "[::1]:8080", "--check", "--out", str(out))
    assert "server r1 [::1]:8000 id 1" in out.read_text()


def test_the_header_the_limits_and_the_silence_are_the_ones_given() -> None:
    options = ("--session-header", "x-conversation", "--sequences", "16", "--silence", "900", "--bound", "125")
    text = run("http://10.0.0.1:8000", "http://10.0.0.2:8000", *options)
    assert "balance hdr(x-conversation)" in text
    assert "hash-type consistent" in text
    assert "hash-balance-factor 125" in text
    assert "default-server maxconn 32 " in text
    assert len(re.findall(r"stick match hdr\(x-conversation\),xxh64 .* lt 16 }", text)) == 2
    assert {"timeout server 900s", "timeout client 900s", "timeout queue 900s"} <= set(
        map(str.strip, text.splitlines())
    )
    assert "http-check send meth GET uri /health" in text


def test_affinity_is_the_hash_alone_with_the_sequences_as_limit_and_round_robin_has_no_hash() -> None:
    affinity = render(Routes(TWO, "affinity", 4))
    assert "balance hdr(x-session-id)" in affinity
    assert "default-server maxconn 4 " in affinity
    assert "hash-balance-factor" not in affinity
    assert "stick" not in affinity
    assert "balance roundrobin" in render(Routes(TWO, "round-robin", 4))


def test_nothing_is_remembered_when_told_not_to() -> None:
    assert "stick" not in render(Routes(TWO, "bounded", remember_s=0))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("10.0.0.1:8000", "not the HTTP address"),
        ("https://10.0.0.1:8000", "not the HTTP address"),
        ("http://10.0.0.1:8000/other", "only host and port"),
        ("http://user:secret@10.0.0.1:8000", "only host and port"),
        ("http://10.0.0.1:80000", "not an address"),
        ("http://bad host:8000", "no usable host"),
        ("http://:8000", "no usable host"),
        ("http://a\n    server evil 1.2.3.4:80", "no usable host"),
    ],
)
def test_a_replica_that_cannot_be_routed_to_is_refused(url, why) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_replica(url)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--policy", "random"), "--policy random is not one of affinity, bounded, round-robin"),
        (("--sequences", "0"), "--sequences is 0"),
        (("--bound", "100"), "--bound is 100"),
        (("--bound", "200"), "one of 2 replicas may then run all"),
        (("--silence", "0"), "--silence is 0"),
        (("--remember", "-1"), "--remember is -1"),
        (("--session-header", "x y"), "not the name of an HTTP header"),
        (("--bind", "8080"), "8080"),
        (("--stats", "nowhere"), "has no port"),
        (("--out", "/nowhere/haproxy.cfg"), "cannot write /nowhere/haproxy.cfg"),
    ],
)
def test_what_cannot_work_is_refused_with_the_option_and_the_value(options, why) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        run("http://10.0.0.1:8000", "http://10.0.0.2:8000", *options)


def test_the_same_replica_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:8000 is given more than once"):
        run("http://10.0.0.1:8000", "http://10.0.0.1:8000/v1")


def test_what_haproxy_refuses_is_said_in_its_words(haproxy, tmp_path) -> None:
    from inpage.routing.haproxy import check_config

    file = tmp_path / "broken.cfg"
    file.write_text("backend x\n    balance nothing\n")
    with pytest.raises(ConfigError, match=r"HAProxy refuses .*broken\.cfg"):
        check_config(file)
