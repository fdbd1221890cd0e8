"""Which blocks have been written: a hit counts only once its content is there (rule 4).

vLLM publishes the hash of a block when it schedules the step that will fill it. That is too early: a
request that was scheduled can be preempted within the same `schedule()` call, and then nothing ever fills
the block although its hash can be found. So the scheduler side keeps the set of blocks that a dispatched
step has written, or will have written before any later step reads them (steps run in order):

| block of                | counts as written once a dispatched step                    |
|-------------------------|-------------------------------------------------------------|
| attention               | has computed the block's last token                         |
| a GDN group             | ends exactly at the block's end, so that the state is saved |

A block leaves the set when the pool hands it out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inpage.state.plan import BlockTables, checkpoint_blocks


class WrittenBlocks:
    """The set of blocks whose content a dispatched step has written or will have written first."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def handed_out(self, blocks: Iterable[int]) -> None:
        """The pool gave these blocks to a new owner, who has written nothing yet."""
        self._blocks.difference_update(blocks)

    def dispatched(
        self,
        request: str,
        position: int,
        tokens: int,
        attention_tables: Sequence[Sequence[int]],
        state_tables: BlockTables,
    ) -> None:
        """A step that computes tokens [position, position + tokens) of the request goes to the workers."""
        end = position + tokens
        first, last = position // self.block_tokens, end // self.block_tokens
        for table in attention_tables:
            self._blocks.update(table[first:last])
        if last > first and end % self.block_tokens == 0:
            self._blocks.update(checkpoint_blocks(request, end, self.block_tokens, state_tables))
