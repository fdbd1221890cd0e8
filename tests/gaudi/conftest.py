"""The double of vllm-gaudi as if it were installed, and runs of the real plugin where there is one."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from qwen3_5 import write_config

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # drivers' words, and the scheduler without a model
from engine_words import run_driver

from inpage.demo.model import DemoModel, make_model
from inpage.demo.server import free_port

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
SERVER_TIMEOUT_S = 300


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
def plugin_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of three kernel blocks; two attention layers, so that the layers of a GDN group have pages apart."""
    return make_model(tmp_path_factory.mktemp("plugin"), DemoModel(layers=8, heads=2, value_heads=2))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twice the heads, so that each of two ranks has as many as `plugin_model`."""
    wide = DemoModel(layers=8, heads=4, kv_heads=2, key_heads=2, value_heads=4)
    return make_model(tmp_path_factory.mktemp("wide"), wide)


@pytest.fixture(scope="session")
def plugin_run(plugin_model: Path, wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`plugin_run(scenario, options, **environment)`: result and log of a real engine; equal calls run once.

    With `tensor_parallel_size` among the options the model is the wide one, with dummy weights the Qwen3.5.
    """
    known: dict[str, Any] = {}
    qwen3_5_model = write_config(tmp_path_factory.mktemp("qwen3_5"))

    def model_for(options: dict[str, Any]) -> Path:
        if "tensor_parallel_size" in options:
            return wide_model
        return qwen3_5_model if options.get("load_format") == "dummy" else plugin_model

    def run(scenario: str, options: dict[str, Any] | None = None, **environment: str) -> Any:
        key = json.dumps([scenario, options, environment], sort_keys=True)
        folder = model_for(options or {})
        if key not in known:
            out = tmp_path_factory.mktemp("plugin") / "result.json"
            fixed = {**PLUGIN_ENVIRONMENT, **environment}
            known[key] = run_driver(DRIVER, scenario, folder, options or {}, fixed, out, TIMEOUT_S)
        return known[key]

    return run


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python whose site-packages have what this environment's have, except inpage; the interpreter's path."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.check_output(command, text=True).strip())
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "inpage" not in path.name:
            (site_packages / path.name).symlink_to(path)
    return python


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """`serving(python, model, log, **environment)`, for the time of a `with` block."""
    return _serving


@contextmanager
def _serving(python: Path, model: Path, log: Path, **environment: str) -> Iterator[str]:
    """vLLM's own server, as docs/gaudi.md starts it; the address at which it answers."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--enable-prefix-caching", "--max-num-batched-tokens", "512", "--enable-prompt-tokens-details"]
    command += [
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        "4",
        "--enforce-eager",
        "--mamba-ssm-cache-dtype",
        "float32",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **PLUGIN_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        url, began = f"http://127.0.0.1:{port}", time.monotonic()
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                    break
            assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-6000:]}"
            assert time.monotonic() - began < SERVER_TIMEOUT_S, log.read_text(errors="replace")[-6000:]
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
