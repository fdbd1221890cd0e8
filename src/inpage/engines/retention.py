"""The policy `value`: in which order blocks are given up when the pool is short. Nothing else is decided here.

vLLM's pool, hashes, free queue and lookup stay the only ones (rule 3). Blocks are freed as vLLM frees them, and found
as vLLM finds them. Only when a block that can be hit is about to be handed out, blocks that are worth less are moved in
front of it in vLLM's own queue. So as long as there is room nothing is dropped, and a prefix that diverges anywhere
hits.

| goes first                                                     | why                                                 |
|----------------------------------------------------------------|-----------------------------------------------------|
| a checkpoint that a running request has left behind, oldest    | only that request's own restart would use it, and   |
| first                                                          | it has a newer one                                  |

| stays by LRU, as vLLM has it                                   | why                                                 |
|----------------------------------------------------------------|-----------------------------------------------------|
| the checkpoint at a prompt's last boundary, or its last mark   | its conversation comes back to it                   |
| the newest of an unfinished request                            | it resumes from there after preemption              |
| a junction: where vLLM has seen a prompt part from another, or | every prompt that begins alike starts there         |
| from which `SHARED` prompts have started                       |                                                     |
| attention blocks                                               | a hit needs them all, from the first on             |

docs/capacity.md has what this gives on recorded sessions, and what else was tried.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

from inpage.errors import ConfigError
from inpage.state.grid import Grid

Retention = Literal["value", "dense"]
RETENTION = "INPAGE_RETENTION"
"""`dense`, the default, is LRU alone; `value` is this module. Where vLLM keeps checkpoints sparsely, that counts."""
SHARED = 3
"""Prompts that start from a checkpoint before it counts as a junction: a conversation's next turn is one, and the same
turn asked again another."""


def retention_wanted() -> Retention:
    """The environment's choice; raises `ConfigError` for what is none."""
    value = os.environ.get(RETENTION, "") or "dense"
    for known in get_args(Retention):
        if value == known:
            return cast(Retention, known)
    raise ConfigError(f"{RETENTION}={value!r} is neither value nor dense: set one of them, or unset it for dense")


class ValueOrder:
    """What is worth less than its turn in the free queue. Its calls move free blocks within the queue, and no more."""

    def __init__(self, pool: Any, grid: Grid) -> None:
        self._pool = pool
        self._block_tokens = grid.block_tokens
        self._left_behind: OrderedDict[int, bytes] = OrderedDict()
        """Block id and the hash under which it was left behind; oldest first."""
        self._starts: dict[int, int] = {}
        self._junctions: set[int] = set()
        """Where vLLM has seen a prompt part from another."""

    # ------------------------------------------------------------------ what happened
    def started(self, checkpoint: Iterable[int]) -> None:
        """A new request starts from these blocks, one of every GDN group."""
        for block in checkpoint:
            self._left_behind.pop(block, None)
            self._starts[block] = self._starts.get(block, 0) + 1

    def retired(self, request: Any, block: Any) -> None:
        """The running request has given back this block of a GDN group, and goes on with a newer one."""
        position = block.block_hash_num_tokens
        if block.block_hash is None or block.ref_cnt:
            return
        if position == request.shared_prefix_boundary:
            self._junctions.add(block.block_id)
        is_last = position == (request.num_prompt_tokens - 1) // self._block_tokens * self._block_tokens
        is_mark = position % self._block_tokens > 0
        is_junction = block.block_id in self._junctions or self._starts.get(block.block_id, 0) >= SHARED
        if not (is_last or is_mark or is_junction):
            self._left_behind[block.block_id] = block.block_hash

    def handed_out(self, blocks: Iterable[Any]) -> None:
        """These blocks have a new owner."""
        for block in blocks:
            self._left_behind.pop(block.block_id, None)
            self._starts.pop(block.block_id, None)
            self._junctions.discard(block.block_id)

    # ------------------------------------------------------------------ the order
    def bring_forward(self, count: int) -> None:
        """Before `count` blocks are taken from the head of the free queue: what is worth less goes there first."""
        if not self._left_behind:
            return
        queue = self._pool.free_block_queue
        block, worth = queue.fake_free_list_head.next_free_block, 0
        for _ in range(min(count, queue.num_free_blocks)):
            worth += block.block_hash is not None
            block = block.next_free_block
        forward = self._take(worth)
        for block in forward:
            queue.remove(block)
        queue.prepend_n(forward)

    def _take(self, count: int) -> list[Any]:
        """Up to `count` free blocks that were left behind; forgets those that somebody uses again."""
        taken: list[Any] = []
        while self._left_behind and len(taken) < count:
            block_id, key = self._left_behind.popitem(last=False)
            block = self._pool.blocks[block_id]
            if block.ref_cnt == 0 and block.block_hash == key:
                taken.append(block)
        return taken
