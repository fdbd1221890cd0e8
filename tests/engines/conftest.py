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


MODELS = {
    "demo": DemoModel(),
    # Two tensor-parallel ranks get a demo model's share each.
    "wide": DemoModel(heads=2, kv_heads=2, key_heads=2, value_heads=2),
    "large blocks": DemoModel(layers=8, heads=2, value_heads=2),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model: random weights, blocks of 256 tokens."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`engine_run(scenario, arguments, model=one of MODELS, **environment)`: result and log; equal calls run once."""
    known: dict[str, Any] = {}
    made: dict[str, Path] = {}

    def run(scenario: str, arguments: dict[str, Any] | None = None, model: str = "demo", **environment: str) -> Any:
        key = json.dumps([scenario, arguments, model, environment], sort_keys=True)
        if model not in made:
            made[model] = make_model(tmp_path_factory.mktemp("made"), MODELS[model])
        if key not in known:
            out = tmp_path_factory.mktemp("engine") / "result.json"
            fixed = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOG_STATS_INTERVAL": "1", **environment}
            known[key] = run_driver(DRIVER, scenario, made[model], arguments or {}, fixed, out, TIMEOUT_S)
        return known[key]

    return run
