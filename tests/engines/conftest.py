"""A tiny hybrid, and engines in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_words import run_driver

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
            fixed = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOG_STATS_INTERVAL": "1", **environment}
            chosen = wide_model if wide else model
            known[key] = run_driver(DRIVER, scenario, chosen, arguments or {}, fixed, out, TIMEOUT_S)
        return known[key]

    return run
