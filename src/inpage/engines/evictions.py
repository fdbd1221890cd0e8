"""Checkpoints that make room: how many had been found by a prompt before, and how many never were.

Looks at a block only when vLLM evicts it or a lookup returns it. Counts blocks: a checkpoint has one per GDN group.
A reset of the cache is not an eviction: vLLM takes the hashes then, and an evicted block must still have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Evictions:
    """`holds_checkpoint` says of a block id whether a state is written there."""

    def __init__(self, holds_checkpoint: Callable[[int], bool]) -> None:
        self._holds_checkpoint = holds_checkpoint
        self._found: set[int] = set()
        self.before_hit = 0
        """Blocks of checkpoints evicted before a lookup had ended on them."""
        self.after_hit = 0
        """Blocks of checkpoints evicted after a lookup had ended on them."""

    def found(self, blocks: Iterable[int]) -> None:
        """Mutates: a lookup ended on these blocks, whether or not its request then gets to run."""
        self._found.update(blocks)

    def evict(self, original: Callable[[Any], bool], block: Any) -> bool:
        """Around `BlockPool._maybe_evict_cached_block`, which vLLM calls for every block it hands out."""
        found = block.block_id in self._found
        self._found.discard(block.block_id)
        evicted = original(block)
        if evicted and self._holds_checkpoint(block.block_id):
            self.after_hit += found
            self.before_hit += not found
        return evicted
