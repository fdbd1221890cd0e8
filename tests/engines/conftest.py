"""A tiny hybrid, and engines in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from inpage.demo.model import DemoModel, make_model
from inpage.demo.server import ENVIRONMENT

DRIVER = Path(__file__).parent / "engine_driver.py"
Run = Callable[..., Any]
TIMEOUT_S = 240


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model: random weights, blocks of 256 tokens."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with twice the heads: two ranks get a demo model's share each."""
    return make_model(tmp_path_factory.mktemp("wide"), DemoModel(heads=2, kv_heads=2, key_heads=2, value_heads=2))


@pytest.fixture(scope="session")
def engine_run(model: Path, wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`engine_run(scenario, arguments, wide=False, **environment)`: result and log; equal calls run once."""
    known: dict[str, Any] = {}

    def run(scenario: str, arguments: dict[str, Any] | None = None, wide: bool = False, **environment: str) -> Any:
        key = json.dumps([scenario, arguments, wide, environment], sort_keys=True)
        if key not in known:
            out = tmp_path_factory.mktemp("engine") / "result.json"
            command = [
                sys.executable,
                str(DRIVER),
                scenario,
                str(wide_model if wide else model),
                str(out),
                json.dumps(arguments or {}),
            ]
            fixed = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
            log_file = out.with_name("log")
            with log_file.open("w") as output:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **fixed, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    process.wait(timeout=TIMEOUT_S)
                finally:
                    with suppress(ProcessLookupError):  # whatever the engine left behind
                        os.killpg(process.pid, signal.SIGKILL)
            log = log_file.read_text(errors="replace")
            assert out.exists(), f"{scenario} ended with status {process.returncode}:\n{log[-6000:]}"
            known[key] = {"result": json.loads(out.read_text()), "log": log}
        return known[key]

    return run
