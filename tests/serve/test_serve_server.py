"""`inpage serve MODEL` with nothing else, for real, on a machine whose memory others hold.

A process of its own holds the rest, so these need a machine with room: each is skipped, with the figures, where the
share that is to stay free is not free now, or is too little for two servers (tests run two at a time).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from inpage.demo.model import make_model
from inpage.demo.server import ENVIRONMENT, free_port
from inpage.layout.units import gib
from inpage.serve.machine import Machine

pytestmark = pytest.mark.engine

ROOM = 6 * 2**30
"""For this server, and one more that another test may have started."""


@contextmanager
def only_free(share: float) -> Iterator[None]:
    """While it lasts, at most this share of the machine's memory is free."""
    machine = Machine.here({})
    if machine is None:
        pytest.skip("no /proc/meminfo here")
    wanted = int(machine.total * share)
    if wanted < ROOM:
        pytest.skip(f"{share:.0%} of {gib(machine.total)} is below {gib(ROOM)}: two servers would not fit")
    if machine.available < wanted:
        pytest.skip(f"{gib(machine.available)} of {gib(machine.total)} are free already, less than {share:.0%}")
    command = [sys.executable, str(Path(__file__).with_name("memory_holder.py")), str(wanted)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline().startswith("holding")
            yield
        finally:
            holder.stdin.close()


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """`inpage serve` with an address of its own and no other flag; its URL once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "inpage", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**environment, **ENVIRONMENT}, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 420
    try:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.25)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("share", [0.6, 0.3])
def test_a_server_with_no_flag_answers_where_others_hold_the_memory(share, tmp_path):
    model, log = make_model(tmp_path / "model"), tmp_path / "log"
    with only_free(share), served(model, log) as url:
        body = {"model": str(model), "prompt": [7] * 300, "max_tokens": 2}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json() for _ in "ab"]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [2, 2]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    said = log.read_text()
    # 8 conversations of 65,536 tokens for each of 8 sequences: 64 * 262 blocks of 32 KiB and the null block.
    assert "--kv-cache-memory-bytes 549486592" in said
    assert "64 whole conversations of 65,536 tokens, chosen; another size:" in said
    assert "16769 blocks, pool of 4,194,554 tokens at max_model_len 65536" in said
    assert "cached: checkpoints at every multiple of 256 tokens (retention dense)" in said
    assert "shortest prompt that can hit 257 tokens" in said
