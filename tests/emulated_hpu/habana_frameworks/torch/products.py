"""Matrix products whose rows do not depend on how many others there are.

A BLAS chooses its kernel by the shape of the whole product, and another kernel adds in another order: a token then
rounds differently in a chunk of 384 and in one of 768. Which shapes do that depends on the processor. Here every
product is computed `ROWS` rows at a time, padded with zeros, one matrix of a batch after the other: whatever the chunk
or batch, each call of the BLAS has the same shape, so a row depends on its own values and the right side alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch

ROWS = 128
"""The kernel block: every chunk starts on a multiple of it, so a token has one place in its block of rows."""

WHOLE = os.environ.get("EMULATED_HPU_PRODUCTS") == "whole"
"""Products as the BLAS computes them, for tests of what holds where rows do depend on the shape."""

_mm = torch.ops.aten.mm.out  # below torch functions, so that the mode of device.py does not come back here
_matmul = torch.ops.aten.matmul.default


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`torch.matmul`, `[..., rows, inner] @ [..., inner, columns]`; vectors and empty ones are left to PyTorch."""
    if WHOLE or left.dim() < 2 or right.dim() < 2 or not left.numel() or not right.numel():
        return _matmul(left, right)
    rows, columns = left.shape[-2], right.shape[-1]
    if right.dim() == 2:
        shape = left.shape[:-1]
        left, right = left.reshape(1, -1, left.shape[-1]), right.unsqueeze(0)
    else:
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        shape = (*batch, rows)
        left = left.expand(*batch, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
        right = right.expand(*batch, *right.shape[-2:]).reshape(-1, *right.shape[-2:])
    count = left.shape[1]
    # `pad` copies in any case, so every block is aligned alike; an alignment may choose the kernel too.
    padded = torch.nn.functional.pad(left, (0, 0, 0, -count % ROWS)).contiguous()
    out = padded.new_empty(*padded.shape[:2], columns)
    blocks = padded.shape[1] // ROWS
    lefts, outs = padded.view(-1, ROWS, padded.shape[2]).unbind(), out.view(-1, ROWS, columns).unbind()
    rights = right.contiguous().unbind()
    for index, (one, result) in enumerate(zip(lefts, outs, strict=True)):
        _mm(one, rights[index // blocks], out=result)
    return out[:, :count].reshape(*shape, columns)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor
) -> torch.Tensor:
    """Softmax attention in float32, shares rounded to the type of `query`: `[batch, kv heads, heads, rows, head_dim]`.

    Key and value are `[batch, kv heads, keys, head_dim]`, `bias` can be broadcast to `[batch, kv heads, heads, rows,
    keys]`. Keys are taken `ROWS` at a time as well, added up in their order: keys that are hidden at the end, as many
    as they are, add zeros to every sum.
    """
    keys, more = key.shape[2], -key.shape[2] % ROWS
    key, value = (torch.nn.functional.pad(part.float(), (0, 0, 0, more)).unsqueeze(2) for part in (key, value))
    step = keys + more if WHOLE else ROWS
    starts = range(0, keys + more, step)
    queries = query.float()
    scores = torch.cat([product(queries, key[..., at : at + step, :].transpose(-1, -2)) for at in starts], dim=-1)
    scores = scores * scale + torch.nn.functional.pad(bias, (0, more), value=float("-inf"))
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = _sum([powers[..., at : at + step].contiguous().sum(-1, keepdim=True) for at in starts])
    shares = (powers / total).to(query.dtype).float()
    return _sum([product(shares[..., at : at + step], value[..., at : at + step, :]) for at in starts])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _matrices(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right, *rest = args
    if rest or kwargs.keys() - {"out"}:
        return function(*args, **kwargs)
    result, out = product(left, right), kwargs.get("out")
    return result if out is None else out.copy_(result)


def _linear(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _with_bias(*args, **kwargs)


def _with_bias(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    result = product(input, weight.t())
    return result if bias is None else result + bias


FUNCTIONS = {
    torch.nn.functional.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matrices),
    **dict.fromkeys((torch.bmm, torch.Tensor.bmm, torch.mm, torch.Tensor.mm), _matrices),
}
"""What takes the place of which torch function: `replacement(function, args, kwargs)`."""
