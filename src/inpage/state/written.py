"""Which blocks have been written: a hit counts only once its content is there (rule 4).

vLLM publishes the hash of a block when it schedules the step that will fill it. That is too early: a
request that was scheduled can be preempted within the same `schedule()` call, and then nothing ever fills
the block although its hash can be found. So the scheduler side keeps what dispatched steps have written, or
will have written before any later step reads it (steps run in order):

| block of                | a prefix of p tokens counts as written once a dispatched step                      |
|-------------------------|-------------------------------------------------------------------------------------|
| attention               | has computed the block's tokens up to p                                             |
| a GDN group             | ends exactly at p, a boundary or a mark of the prompt, so that the state is saved    |

A copy of a GDN group's block holds what its source holds. A copy of an attention block holds what the request that
starts from it has in common with the source's owner: it counts up to the start. What a block held counts for nothing
once the pool hands it out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inpage.state.grid import Grid
from inpage.state.plan import BlockTables, checkpoint_blocks, is_saved


class WrittenBlocks:
    """How far the blocks are written, by dispatched steps."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._rows: dict[int, int] = {}
        self._states: dict[int, int] = {}

    def holds_rows(self, block: int, position: int) -> bool:
        """Whether an attention block has its rows of the first `position` tokens of its prefix."""
        return self._rows.get(block, 0) >= position

    def holds_state(self, block: int, position: int) -> bool:
        """Whether a block of a GDN group has the state after exactly `position` tokens."""
        return self._states.get(block) == position

    def has_state(self, block: int) -> bool:
        """Whether a checkpoint of any position is written in the block."""
        return block in self._states

    def __len__(self) -> int:
        return len(self._rows) + len(self._states)

    def handed_out(self, blocks: Iterable[int]) -> None:
        """The pool gave these blocks to a new owner, who has written nothing yet."""
        for block in blocks:
            self._rows.pop(block, None)
            self._states.pop(block, None)

    def copied(self, source: int, target: int) -> None:
        """A dispatched step copies the block first; only states come along, see above."""
        position = self._states.get(source)
        if position is not None:
            self._states[target] = position

    def started(self, position: int, attention_tables: Sequence[Sequence[int]]) -> None:
        """A dispatched step starts a request at `position`; inside a block, a copy brought the rows before it."""
        if position % self.grid.block_tokens:
            for table in attention_tables:
                self._rows[table[self.grid.block_index(position)]] = position

    def dispatched(
        self,
        request: str,
        position: int,
        tokens: int,
        attention_tables: Sequence[Sequence[int]],
        state_tables: BlockTables,
        prompt_tokens: int = 0,
    ) -> None:
        """A step that computes tokens [position, position + tokens) of the request goes to the workers."""
        block_tokens, end = self.grid.block_tokens, position + tokens
        first, full = position // block_tokens, end // block_tokens
        for table in attention_tables:
            for index in range(first, full):
                self._rows[table[index]] = (index + 1) * block_tokens
            if end % block_tokens and self.grid.has_marks:
                self._rows[table[full]] = end
        if is_saved(end, prompt_tokens, self.grid):
            for block in checkpoint_blocks(request, end, self.grid, state_tables):
                self._states[block] = end
