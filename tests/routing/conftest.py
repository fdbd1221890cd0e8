"""HAProxy is real; the replicas here are doubles: HTTP servers that run a few requests at once and say when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from inpage.demo.server import free_port
from inpage.routing.haproxy import INSTALL, find_haproxy, running_haproxy
from inpage.routing.haproxy_config import REPLICA_HEADER, Routes, parse_address, parse_replica, render

HEADER = "x-session-id"


class Replica:
    """A double of a server with `sequences`: what is above them waits, as in vLLM; `let_go` ends what runs.

    `arrived` has the session of every request in the order of arrival, `running` how many run now.
    """

    def __init__(self, sequences: int) -> None:
        self.arrived: list[str | None] = []
        self.running = 0
        self.healthy = True
        self._holding = threading.Event()
        self._holding.set()
        places = threading.Semaphore(sequences)
        lock = threading.Lock()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.answer(200 if replica.healthy else 503)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    replica.arrived.append(self.headers.get(HEADER))
                with places:
                    with lock:
                        replica.running += 1
                    replica._holding.wait(30)
                    with lock:
                        replica.running -= 1
                self.answer(200)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None: ...  # a router that closes a connection is no news

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def hold(self) -> None:
        """Requests run until `let_go`."""
        self._holding.clear()

    def let_go(self) -> None:
        """What runs and what waits ends."""
        self._holding.set()


class Router:
    """Real HAProxy in front of doubles."""

    def __init__(self, url: str, replicas: list[Replica], pool: ThreadPoolExecutor) -> None:
        self.url, self.replicas, self._pool = url, replicas, pool
        self._http = httpx.Client(timeout=30, limits=httpx.Limits(max_connections=None))

    def ask(self, session: str | None) -> str:
        """One request; the name of the replica that answered."""
        headers = {} if session is None else {HEADER: session}
        response = self._http.post(f"{self.url}/v1/completions", headers=headers, content=b"{}")
        assert response.status_code == 200, response.text
        return response.headers[REPLICA_HEADER]

    def begin(self, session: str | None) -> Future[str]:
        """The same without waiting for the answer."""
        return self._pool.submit(self.ask, session)

    def sessions_of(self, replica: str, number: int) -> list[str]:
        """Names of sessions whose hash chooses this replica when nothing runs."""
        found = [name for name in (f"session-{i}" for i in range(64)) if self.ask(name) == replica]
        assert len(found) >= number, f"the hash sent {len(found)} of 64 sessions to {replica}"
        self.forget()
        return found[:number]

    def forget(self) -> None:
        """Start counting arrivals again."""
        for each in self.replicas:
            each.arrived.clear()

    def settled(self, total: int, quiet_s: float = 20.0) -> list[int]:
        """Arrivals of each replica once `total` have arrived, or when no more came for so long."""
        last, since = self.arrivals, time.monotonic()
        while sum(last) < total and time.monotonic() - since < quiet_s:
            time.sleep(0.02)
            if self.arrivals != last:
                last, since = self.arrivals, time.monotonic()
        return last

    @property
    def arrivals(self) -> list[int]:
        """Requests that have reached each replica, running or waiting there."""
        return [len(replica.arrived) for replica in self.replicas]


@pytest.fixture
def haproxy() -> str:
    program = find_haproxy()
    if program is None:
        pytest.skip(INSTALL)
    return program


@pytest.fixture
def route(haproxy: str, tmp_path: Path) -> Callable[..., Any]:
    """`route(policy, replicas=2, sequences=4, **options)` as a context manager that yields a `Router`."""

    @contextmanager
    def route(policy: str, replicas: int = 2, sequences: int = 4, **options: Any) -> Iterator[Router]:
        with ExitStack() as stack:
            doubles = [Replica(sequences) for _ in range(replicas)]
            for double in doubles:
                stack.callback(double.server.server_close)
                stack.callback(double.server.shutdown)
                stack.callback(double.let_go)
            bind = parse_address(f"127.0.0.1:{free_port()}")
            addresses = tuple(parse_replica(double.url) for double in doubles)
            text = render(Routes(addresses, policy, sequences, bind=bind, **options))  # type: ignore[arg-type]
            url = stack.enter_context(running_haproxy(text, f"http://{bind}", tmp_path / "haproxy.log"))
            pool = stack.enter_context(ThreadPoolExecutor(64))
            stack.callback(lambda: [double.let_go() for double in doubles])
            yield Router(url, doubles, pool)

    return route


@pytest.fixture
def replica() -> Iterator[Replica]:
    """One replica that runs four requests at once."""
    made = Replica(4)
    yield made
    made.server.shutdown()
    made.server.server_close()
