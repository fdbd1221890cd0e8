"""How large a pool may be on a machine that also holds the weights, the engine and other people's programs."""

from __future__ import annotations

from dataclasses import dataclass

from inpage.layout.geometry import Geometry
from inpage.layout.pool import Layout, blocks_per_request, largest_max_model_len, printed_tokens
from inpage.state.grid import Grid

ENGINE_BYTES = 2 * 2**30
"""What vLLM 0.30.0 takes on CPU beside weights, slots and pool: its three processes hold 1.4 GiB, 1.6 GiB while they
compile (measured with the demo's model); the rest is for the activations of a step."""

RANK_BYTES = 2**30
"""The same for every further rank, which is one more process."""

SHARE = (4, 5)
"""The pool takes four fifths of what is left: vLLM writes all of it at start, and others want to go on working."""

CONVERSATIONS_PER_SEQUENCE = 8
"""A chosen pool holds no more whole conversations than this for every running sequence: the memory is of more use to
others, and a larger pool starts slower."""


def spare_bytes(available: int, weights: int, beside: int, ranks: int) -> int:
    """What a chosen pool may take on each of `ranks`; negative or zero when nothing is left.

    available: bytes that are free now. weights: of all ranks together. beside: slots of one rank.
    """
    left = available - weights - ENGINE_BYTES - (ranks - 1) * RANK_BYTES - ranks * beside
    return left * SHARE[0] // SHARE[1] // ranks


def useful_bytes(layout: Layout, geometry: Geometry, max_model_len: int, max_num_seqs: int) -> int:
    """The largest pool that is chosen: whole conversations for every running sequence, and the null block."""
    each = blocks_per_request(layout, geometry, max_model_len)
    return (CONVERSATIONS_PER_SEQUENCE * max_num_seqs * each + 1) * geometry.block_bytes


@dataclass(frozen=True)
class Holds:
    """What a pool of `num_blocks` holds at a max-model-len; `tokens` is what vLLM prints as KV cache size."""

    num_blocks: int
    tokens: int
    conversations: int
    longest: int


def holds(num_blocks: int, layout: Layout, geometry: Geometry, max_model_len: int, grid: Grid) -> Holds:
    """Tokens, whole conversations of max_model_len, and the longest request that the pool can serve at all.

    With marks a request holds more blocks for one step (`Grid.blocks_at_once`), which the engine asks for at start.
    """
    each = blocks_per_request(layout, geometry, max_model_len)
    longest = largest_max_model_len(num_blocks, geometry, layout)
    if grid.has_marks:
        free = num_blocks - 1 - grid.blocks_at_once(0, geometry.gdn_groups)
        longest = min(longest, max(0, free) * geometry.block_tokens)
    tokens = printed_tokens(num_blocks, geometry, max_model_len, layout)
    return Holds(num_blocks, tokens, max(0, num_blocks - 1) // each, longest)


def blocks_needed(tokens: int, layout: Layout, geometry: Geometry, grid: Grid) -> int:
    """Blocks of the smallest pool that serves one request of so many tokens, the null block among them."""
    at_once = grid.blocks_at_once(tokens, geometry.gdn_groups) if grid.has_marks else 0
    return 1 + max(blocks_per_request(layout, geometry, tokens), at_once)
