"""The ledger: what each page holds (rule 5).

A page is in one of three conditions: it holds attention rows, a checkpoint at a position, or something
unknown. Only a checkpoint at exactly the position from which a request starts may be restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inpage.errors import StateError

NULL_BLOCK = 0
"""vLLM's placeholder block: in tables where no block is needed, never read and never written."""


@dataclass(frozen=True)
class Attention:
    """The page holds attention rows (or zeros, right after it was handed out)."""

    def __str__(self) -> str:
        return "attention rows"


@dataclass(frozen=True)
class Checkpoint:
    """The page holds a GDN group's state after `position` tokens."""

    position: int

    def __str__(self) -> str:
        return f"the checkpoint of position {self.position}"


class Ledger:
    """Contents of the pages, by block id; a block that is not listed holds something unknown."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._contents: dict[int, Attention | Checkpoint] = {}

    def content(self, block: int) -> Attention | Checkpoint | None:
        """What the page holds, None for unknown."""
        return self._contents.get(block)

    def counts(self) -> tuple[int, int]:
        """How many pages are known to hold attention rows, and how many a checkpoint."""
        checkpoints = sum(isinstance(content, Checkpoint) for content in self._contents.values())
        return len(self._contents) - checkpoints, checkpoints

    # mutations
    def forget(self, blocks: Iterable[int]) -> None:
        """The blocks changed hands; whatever their pages held counts for nothing."""
        for block in blocks:
            self._contents.pop(block, None)

    def record_attention(self, blocks: Iterable[int]) -> None:
        """The blocks now belong to attention."""
        for block in blocks:
            self.check_block(block, "an attention block")
            self._contents[block] = Attention()

    def record_checkpoint(self, block: int, position: int) -> None:
        """The page now holds the state after `position` tokens."""
        self._contents[block] = Checkpoint(position)

    def record_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """Targets hold what their sources hold; refuses a source of unknown content, before anything changes."""
        contents = []
        for source, target in copies:
            self.check_block(source, f"the source of a copy into block {target}")
            self.check_block(target, f"the target of a copy of block {source}")
            content = self._contents.get(source)
            if content is None:
                raise StateError(
                    f"block {target} would become a copy of block {source}, whose page holds something unknown: "
                    "whoever reads it would be served a wrong state"
                )
            contents.append((target, content))
        self._contents.update(contents)

    # refusals
    def check_block(self, block: int, what: str) -> None:
        """Refuse the null block and ids outside the pool."""
        if block == NULL_BLOCK:
            raise StateError(f"{what} is the null block (id 0), whose page is shared by all requests")
        if not 0 < block < self.num_blocks:
            raise StateError(f"{what} is block {block}, but the pool has blocks 1 to {self.num_blocks - 1}")

    def check_writable(self, request: str, blocks: Sequence[int], position: int) -> None:
        """Refuse to put a checkpoint over attention rows, or two groups' checkpoints into one block."""
        for block in blocks:
            self.check_block(block, f"the checkpoint of request {request} at position {position}")
            if isinstance(self._contents.get(block), Attention):
                raise StateError(
                    f"the checkpoint of request {request} at position {position} would go into block {block}, whose "
                    "page holds attention rows: the block does not belong to a GDN group"
                )
        if len(set(blocks)) != len(blocks):
            raise StateError(
                f"the checkpoint of request {request} at position {position} needs a block for each GDN group, "
                f"but the groups' blocks are {list(blocks)}"
            )

    def check_restorable(self, request: str, block: int, position: int) -> None:
        """Refuse a page that does not hold the checkpoint from which the request starts."""
        self.check_block(block, f"the checkpoint of request {request} at position {position}")
        content = self._contents.get(block)
        if content != Checkpoint(position):
            raise StateError(
                f"request {request} starts at position {position} from block {block}, whose page holds "
                f"{content or 'something unknown'}: restoring it would serve a wrong state"
            )
