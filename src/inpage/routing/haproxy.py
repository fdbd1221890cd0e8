"""HAProxy itself: find it, have it check a configuration, run it for the time of a `with` block."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from inpage.errors import ConfigError, ServerError

INSTALL = "HAProxy is not installed; on Debian and Ubuntu: apt-get install haproxy"


def find_haproxy() -> str | None:
    """Path of the program, None when it is not there; Debian's is outside an ordinary user's search path."""
    return shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")


def check_config(file: Path) -> None:
    """Have HAProxy read a configuration; raises `ConfigError` with its words when it refuses."""
    result = subprocess.run([_program(), "-c", "-f", str(file)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ConfigError(f"HAProxy refuses {file}:\n{(result.stderr or result.stdout).strip()}")


@contextmanager
def running_haproxy(config: str, url: str, log: Path, timeout_s: float = 20.0) -> Iterator[str]:
    """HAProxy with this configuration, which must answer at `url`; yields `url`, raises `ServerError`.

    It waits until a replica has passed its first check, which an answer of `/health` through it shows.
    """
    file = log.with_suffix(".cfg")
    file.write_text(config, encoding="utf-8")
    check_config(file)
    with log.open("w") as output:
        process = subprocess.Popen([_program(), "-db", "-f", str(file)], stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, url, log, timeout_s)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    last = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"HAProxy ended with status {process.returncode}:\n{log.read_text(errors='replace')}")
        try:
            status = httpx.get(f"{url}/health", timeout=2.0).status_code
            if status == 200:
                return
            last = f"HTTP {status}"
        except httpx.HTTPError as error:
            last = type(error).__name__
        time.sleep(0.1)
    raise ServerError(f"{url}/health through HAProxy gave {last} for {timeout_s:.0f} s: no replica is healthy")


def _program() -> str:
    program = find_haproxy()
    if program is None:
        raise ConfigError(INSTALL)
    return program
