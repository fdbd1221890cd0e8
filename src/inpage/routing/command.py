"""`inpage route-config`: write the configuration of a router in front of replicas."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, cast

import typer

from inpage.errors import ConfigError
from inpage.routing.haproxy import check_config
from inpage.routing.haproxy_config import POLICIES, Policy, Routes, parse_address, parse_replica, render


def route_config(
    replicas: Annotated[list[str], typer.Argument(help="Addresses, such as http://10.0.0.1:8000.")],
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "bounded",
    sequences: Annotated[int, typer.Option(help="Requests a replica runs at once: its --max-num-seqs.")] = 4,
    session_header: Annotated[str, typer.Option(help="Names the session in each request.")] = "x-session-id",
    bound: Annotated[int, typer.Option(help="Percent of the average load that one replica may have.")] = 110,
    remember: Annotated[
        int, typer.Option(help="Seconds that a session's replica is known after its last request; 0 for never.")
    ] = 3600,
    bind: Annotated[str, typer.Option(help="Where the router listens.")] = "*:8080",
    stats: Annotated[str | None, typer.Option(help="Serve a status page here, and /metrics for Prometheus.")] = None,
    silence: Annotated[int, typer.Option(help="Seconds without a byte until a request is given up.")] = 600,
    out: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Have the HAProxy of this machine read it first.")] = False,
) -> None:
    """Write a HAProxy configuration that sends a session back to the replica that has its cache."""
    routes = Routes(
        replicas=tuple(parse_replica(url) for url in replicas),
        policy=cast(Policy, policy),
        sequences=sequences,
        session_header=session_header,
        bound=bound,
        remember_s=remember,
        bind=parse_address(bind),
        stats=None if stats is None else parse_address(stats),
        silence_s=silence,
    )
    text = render(routes)
    if check:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "haproxy.cfg"
            file.write_text(text, encoding="utf-8")
            check_config(file)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    typer.echo(f"{out}: {len(routes.replicas)} replicas, policy {policy}, maxconn {routes.maxconn} each", err=True)
