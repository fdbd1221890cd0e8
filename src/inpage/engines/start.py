"""The line that an engine logs at start: what a person needs to know before the first prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inpage.engines.retention import retention_wanted
from inpage.engines.scheduler import geometry_of
from inpage.layout.pool import printed_tokens
from inpage.state.grid import Grid
from inpage.state.mover import Mover
from inpage.state.pages import WORD, LayerStates


def start_line(
    mover: Mover,
    layers: Iterable[LayerStates],
    kv_cache_config: Any,
    max_model_len: int,
    retention: int | str | None,
    also: str = "",
) -> str:
    """The line; a slot holds the states of `layers`, `retention` is vLLM's interval, `also` what else is set."""
    slot_bytes, blocks = sum(layer.words * WORD for layer in layers), kv_cache_config.num_blocks
    tokens = printed_tokens(blocks, geometry_of(kv_cache_config), max_model_len, "in-page")
    return (
        f"inpage: in-page layout, block {mover.block_tokens} tokens, cached: {cached(mover.grid, retention)}; shortest "
        f"prompt that can hit {shortest_hit(mover.grid)} tokens, {blocks} blocks, pool of {tokens:,} tokens at "
        f"max_model_len {max_model_len}, {mover.slots.count} slots of {slot_bytes / 2**20:.1f} MiB each beside the pool"
        f"{f', {also}' if also else ''}."
    )


def cached(grid: Grid, retention: int | str | None) -> str:
    """Which prefixes get a checkpoint, and every how many tokens; `retention` as vLLM has it, None keeps all."""
    return f"checkpoints {_kept(grid.block_tokens, retention)}{_marks(grid)}"


def shortest_hit(grid: Grid) -> int:
    """Tokens of the shortest prompt that can hit: up to the first checkpoint, and one that is always computed."""
    return grid.mark_tokens + 1


def _kept(block: int, retention: int | str | None) -> str:
    """One case for each policy of `--prefix-cache-retention-interval`."""
    if retention in (None, ""):
        return f"at every multiple of {block} tokens (retention {retention_wanted()})"
    if int(retention) == 0:
        return f"at a prompt's last multiple of {block} tokens and where prompts part (retention sparse)"
    return f"at every multiple of {retention} tokens and a prompt's last of {block} (retention {retention})"


def _marks(grid: Grid) -> str:
    return f", and at a prompt's last multiple of {grid.mark_tokens}" if grid.has_marks else ""
