"""Device "hpu" becomes "cpu" in every call of a torch function, in every thread; products become those of products.py.

Also, row indices may be -1: the plugin pads with it and the device does not fault. Here -1 is the last row, which
the plugin allocates for the purpose; what the hardware really touches is unknown (README.md).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from habana_frameworks.torch.products import FUNCTIONS as PRODUCTS

_CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "hpu":
        return _CPU
    if isinstance(value, str) and value.split(":")[0] == "hpu":
        return "cpu"
    return value


def _device_argument(value: Any) -> Any:
    """As `_on_cpu`; a bare number is the index of an accelerator."""
    return _CPU if type(value) is int else _on_cpu(value)


def _rows_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(tensor, dim, index, ...)` with -1 as the last row."""
    tensor, dim, index, *rest = args
    return function(tensor, dim, torch.where(index < 0, index + tensor.shape[dim], index), *rest, **kwargs)


def _embedding(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index, weight, *rest = args
    return function(torch.where(index < 0, index + weight.shape[0], index), weight, *rest, **kwargs)


def _one_hot(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A negative class is a row of zeros."""
    index, classes = args[0], args[1] if len(args) > 1 else kwargs["num_classes"]
    return (index.unsqueeze(-1) == torch.arange(classes)).long()


_INSTEAD = {
    **PRODUCTS,
    torch.Tensor.index_select: _rows_of,
    torch.index_select: _rows_of,
    torch.Tensor.index_copy_: _rows_of,
    torch.Tensor.index_add_: _rows_of,
    torch.Tensor.index_reduce_: _rows_of,
    torch.nn.functional.embedding: _embedding,
    torch.nn.functional.one_hot: _one_hot,
}


class _HpuIsCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _device_argument(kwargs["device"])}
        if function is torch.Tensor.to:
            args = tuple(map(_on_cpu, args))
        instead = _INSTEAD.get(function)
        return instead(function, args, kwargs) if instead and args else function(*args, **kwargs)


_entered = threading.local()


def _enter() -> None:
    if not getattr(_entered, "yes", False):
        _entered.yes = True
        _HpuIsCpu().__enter__()


class _GeneratorType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


def install() -> None:
    """Switch the current process over; modes belong to a thread, so later threads enter it when they start."""
    _enter()
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        _enter()
        run(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]

    # `module.to("hpu")` and `torch.Generator("hpu")` parse the device in C++, out of the mode's reach.
    parse = torch._C._nn._parse_to
    torch._C._nn._parse_to = lambda *args, **kwargs: parse(
        *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()}
    )
    generator = torch.Generator
    torch.Generator = _GeneratorType(  # type: ignore[misc]
        "Generator", (), {"__new__": lambda cls, device="cpu": generator(device=_on_cpu(device))}
    )
