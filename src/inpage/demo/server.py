"""Starts the real server in processes of its own, waits until it answers, and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from inpage.errors import ServerError
from inpage.serve.command import build

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # Compiling helpers on first use takes 20 s and changes nothing that is measured here.
    "TORCH_COMPILE_DISABLE": "1",
    # Numerics depend on the thread count; one thread leaves the other core to the client. Left to itself, vLLM binds a
    # worker to every core but the last and takes as many threads: two servers on two cores would share the first.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # What the servers say of themselves goes into the report.
    "VLLM_LOGGING_LEVEL": "INFO",
}
SHUTDOWN_S = 10
"""vLLM kills its workers at once by default, mostly before they have logged their last counters."""


@dataclass(frozen=True)
class RunningServer:
    """A server that answers; `log` grows while it runs."""

    url: str
    log: Path
    pid: int

    def lines(self, containing: str) -> list[str]:
        """Lines of the log with this text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if containing in line]


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """`inpage serve` in processes of its own; starts at once, `wait` says when it answers."""

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        layout: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        own = ["--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", str(SHUTDOWN_S)]
        launch = build(model, [*own, *arguments], layout)
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                launch.command,
                env={**os.environ, **ENVIRONMENT, **launch.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Not a session of its own: Linux gives sessions equal shares, and then starves a pinned worker.
                process_group=0,
            )

    def wait(self, waiting: Callable[[float], None] = lambda seconds: None, timeout_s: float = 240.0) -> RunningServer:
        """Wait until the server answers.

        `waiting` is called a few times a second with the seconds waited so far. Raises `ServerError` with the end
        of the log when the server ends or does not answer in time.
        """
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            if self._process.poll() is not None:
                status = self._process.returncode
                raise ServerError(f"the server ended with status {status} before it answered:\n{_tail(self._log)}")
            if waited > timeout_s:
                raise ServerError(f"the server did not answer within {timeout_s:.0f} s:\n{_tail(self._log)}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/health", timeout=2.0).status_code == 200:
                    return RunningServer(self._url, self._log, self._process.pid)
            waiting(waited)
            time.sleep(0.25)

    def stop(self) -> None:
        """Ask politely, so that the last counters are logged; then end the whole process group."""
        deadline = time.monotonic() + 20
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=20)
        with suppress(ProcessLookupError):
            # A server that stopped itself leaves workers, which log their last counters after it.
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.1)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running_server(
    model: str, arguments: Sequence[str], layout: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """A server for the time of a `with` block."""
    process = ServerProcess(model, arguments, layout, log, environment)
    try:
        yield process.wait()
    finally:
        process.stop()


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace").splitlines()
    return "\n".join([f"(the whole log: {log})", *text[-lines:]])
