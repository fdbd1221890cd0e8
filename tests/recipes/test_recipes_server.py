"""A CPU recipe run for real: the server's own start-up line has the expected block and pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest

from inpage.demo.server import free_port
from inpage.recipes.library import find

pytestmark = pytest.mark.engine

NAME = "small-next-cpu"


@pytest.fixture
def server(tmp_path):
    """`inpage recipe NAME --run` in processes of its own: address and log."""
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "inpage", "recipe", NAME, "--run", "--models", str(tmp_path / "models")]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
            process_group=0,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.25)
        yield url, log
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_inpage_recipe_run_serves_with_the_expected_block_and_pool(server) -> None:
    url, log = server
    expected, said = find(NAME).expected, log.read_text()
    assert f"in-page layout, block {expected.block_tokens} tokens" in said
    assert f"{expected.num_blocks} blocks, pool of {expected.printed_tokens:,} tokens" in said
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [7] * (2 * expected.block_tokens + 9), "max_tokens": 2}
    cached = []
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        cached.append((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    assert cached == [0, 2 * expected.block_tokens]
