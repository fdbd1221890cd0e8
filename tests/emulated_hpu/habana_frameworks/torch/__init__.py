"""`habana_frameworks.torch` on a CPU: device "hpu" is the CPU, graphs and streams do nothing, kernels are PyTorch.

The submodules that vllm-gaudi imports are made here, by name, so that the whole surface is on one page. Whatever
is not listed fails on import or access, which is how a new need of a plugin release shows.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from habana_frameworks.torch import device, kernels

MEMORY_BYTES = int(float(os.environ.get("EMULATED_HPU_GIB", "2")) * 2**30)
"""What the device claims to have, all of it free."""


def _module(name: str, **contents: Any) -> ModuleType:
    """Make `habana_frameworks.torch.<name>` importable, with these contents."""
    full_name = f"{__name__}.{name}"
    module = ModuleType(full_name)
    vars(module).update(contents)
    sys.modules[full_name] = module
    parent, _, last = full_name.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return module


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Device calls that have no effect here."""


def _same(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What would record a graph returns its argument."""
    return module


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    """A stream that has always caught up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class _Metric:
    """Graph compilation counters: nothing is ever compiled."""

    def stats(self) -> list[tuple[str, Any]]:
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0), ("GraphCompilation", [])]


SynDeviceType = enum.IntEnum("SynDeviceType", {"synDeviceGaudi2": 4, "synDeviceGaudi3": 5})
"""Device generations; the numbers matter to nobody here."""


@contextlib.contextmanager
def _context(*args: Any, **kwargs: Any) -> Any:
    yield _Metric()


_STREAM = Stream()

_module(
    "core",
    mark_step=_nothing,
    hpu_initialize=_nothing,
    hpu_set_env=_nothing,
    hpu_inference_set_env=_nothing,
    hpu_inference_initialize=_nothing,
)
_module("utils")
_module("utils.internal", is_lazy=lambda: os.environ.get("PT_HPU_LAZY_MODE", "0") == "1")
_module(
    "utils.experimental",
    synDeviceType=SynDeviceType,
    _get_device_type=lambda: SynDeviceType.synDeviceGaudi2,
    _data_ptr=lambda tensor: tensor.data_ptr(),
)
_module("internal")
_module("internal.bridge_config", get_pt_compile_only_mode=lambda: False, env_setting=_context)
hpu = _module(
    "hpu",
    Event=Event,
    Stream=Stream,
    stream=_context,
    current_stream=lambda *args: _STREAM,
    default_stream=lambda *args: _STREAM,
    synchronize=_nothing,
    init=_nothing,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: int(os.environ.get("EMULATED_HPU_DEVICES", "2")),
    current_device=lambda: 0,
    set_device=_nothing,
    get_device_name=lambda *args: "emulated HPU (CPU)",
    mem_get_info=lambda *args: (MEMORY_BYTES, MEMORY_BYTES),
    memory_allocated=lambda *args: 0,
    max_memory_allocated=lambda *args: 0,
    memory_reserved=lambda *args: 0,
    memory_stats=lambda *args: {},
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
    wrap_in_hpu_graph=_same,
    manual_seed=torch.default_generator.manual_seed,
    manual_seed_all=torch.default_generator.manual_seed,
)
_module("hpu.metrics", metric_localcontext=_context, metric_global=lambda name: _Metric())
_module("hpu.random", manual_seed=hpu.manual_seed, manual_seed_all=hpu.manual_seed_all)
_module("hpu.graphs", wrap_in_hpu_graph=_same, input_hash=lambda value: hash(str(value)))
_module("hpex")
_module(
    "hpex.kernels",
    FusedSDPA=kernels.FusedSDPA,
    RotaryPosEmbeddingMode=kernels.RotaryPosEmbeddingMode,
    apply_rotary_pos_emb=kernels.apply_rotary_pos_emb,
)
_module("hpex.normalization", FusedRMSNorm=kernels.FusedRMSNorm)
_module("dynamo_backend", hpu_backend=lambda graph, inputs, **options: graph.forward)

torch.hpu = hpu  # type: ignore[attr-defined]
sys.modules["torch.hpu"] = hpu
device.install()

if not hasattr(dist.Backend, "HCCL"):
    dist.Backend.register_backend(
        "hccl",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["cpu", "hpu"],
    )
