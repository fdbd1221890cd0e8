"""The double of vllm-gaudi as if it were installed, and runs of the real plugin where there is one."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inpage.demo.model import DemoModel, make_model

HERE = Path(__file__).parent
DOUBLE = HERE / "double"
DRIVER = HERE / "plugin_driver.py"
PLUGIN_ENVIRONMENT = {
    "EMULATED_HPU_GIB": "0.25",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PT_HPU_LAZY_MODE": "0",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOG_STATS_INTERVAL": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SKIP_WARMUP": "true",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
TIMEOUT_S = 540

sys.path.insert(0, str(HERE.parent / "engines"))  # scheduler_double.py: the real scheduler without a model


def _forget(*packages: str) -> None:
    for name in list(sys.modules):
        if any(name == package or name.startswith(package + ".") for package in packages):
            del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if parent in sys.modules and hasattr(sys.modules[parent], last):
                delattr(sys.modules[parent], last)


@pytest.fixture
def installed_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The double is what `import vllm_gaudi` finds."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    for name in ("VLLM_COMPACT_GDN", "INPAGE", "INPAGE_HYBRID_DECODE_PAD", "VLLM_CONTIGUOUS_PA"):
        monkeypatch.delenv(name, raising=False)
    gaudi = ("vllm_gaudi", "inpage.engines.gaudi", "inpage.engines.gaudi_platform")
    _forget(*gaudi)
    yield
    _forget(*gaudi)


@pytest.fixture
def gaudi(installed_double: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`inpage.engines.gaudi` over the double, asked for."""
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    module = importlib.import_module("inpage.engines.gaudi")
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    return module


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model: random weights, blocks of 384 tokens."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twice the heads, so that each of two ranks has as many as `model`."""
    return make_model(tmp_path_factory.mktemp("wide"), DemoModel(heads=4, kv_heads=2, key_heads=2, value_heads=4))


@pytest.fixture(scope="session")
def plugin_run(model: Path, wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`plugin_run(scenario, options, **environment)`: result and log of a real engine; equal calls run once.

    With `tensor_parallel_size` among the options the model is the wide one.
    """
    known: dict[str, Any] = {}

    def run(scenario: str, options: dict[str, Any] | None = None, **environment: str) -> Any:
        key = json.dumps([scenario, options, environment], sort_keys=True)
        folder = wide_model if options and "tensor_parallel_size" in options else model
        if key not in known:
            out = tmp_path_factory.mktemp("plugin") / "result.json"
            log_file = out.with_name("log")
            command = [sys.executable, str(DRIVER), scenario, str(folder), str(out), json.dumps(options or {})]
            with log_file.open("w") as output:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **PLUGIN_ENVIRONMENT, **environment},
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
