"""Where checkpoints may lie: at boundaries, and at marks between them when sub-block hits are on."""

from __future__ import annotations

from dataclasses import dataclass

from inpage.errors import ConfigError


@dataclass(frozen=True)
class Grid:
    """Blocks of `block_tokens`, marks every `mark_tokens` (vLLM's `prefix_match_unit`); equal when there are none.

    A boundary is a multiple of `block_tokens`, a mark a multiple of `mark_tokens`; every boundary is a mark.
    """

    block_tokens: int
    mark_tokens: int

    def __post_init__(self) -> None:
        if self.mark_tokens < 1 or self.block_tokens % self.mark_tokens:
            raise ConfigError(
                f"marks every {self.mark_tokens} tokens do not divide blocks of {self.block_tokens} tokens: "
                "--prefix-match-unit has to divide the block"
            )

    @property
    def has_marks(self) -> bool:
        """Whether there are marks inside a block."""
        return self.mark_tokens < self.block_tokens

    def block_index(self, position: int) -> int:
        """Which entry of a block table holds the checkpoint of `position`: the block that its last token is in."""
        return (position - 1) // self.block_tokens

    def tokens_to_boundary(self, position: int, tokens: int) -> int:
        """Of a chunk of so many tokens from `position`, those up to the last boundary that it would pass.

        All of them when it passes none, or ends on one; at least one token of a chunk that has any.
        """
        end = position + tokens
        if position // self.block_tokens == end // self.block_tokens:
            return tokens
        return tokens - end % self.block_tokens

    def blocks_at_once(self, tokens: int, groups: int) -> int:
        """Blocks that a request of so many tokens may hold in one step, with `groups` GDN groups.

        Its attention blocks and two of every GDN group. With marks also a copy of the last block of every group, and
        the attention block that it was copied from.
        """
        return -(-tokens // self.block_tokens) + (2 + 3 * groups if self.has_marks else 2 * groups)
