"""Pages and slots as bytes: exact copies between them, outside compiled graphs (rule 2).

A GDN layer's state is one or more slot tensors (conv window and ssm matrix, or both in one); a page is
one or more page tensors (K's rows, then V's, or both in one). Both sides are seen as rows of int32, so
that a copy can neither round nor touch a NaN's payload, and are cut where either side changes tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from inpage.errors import ConfigError, StateError

WORD = 4
"""Bytes of an int32, the unit of copying."""


def rows_of_words(tensor: torch.Tensor, rows: int, what: str) -> torch.Tensor:
    """View a contiguous tensor of any dtype as `[rows, words]` int32; `ConfigError` when that needs a copy."""
    row_bytes, left = divmod(tensor.numel() * tensor.element_size(), rows)
    first_byte = tensor.storage_offset() * tensor.element_size()
    if left or row_bytes % WORD or first_byte % WORD or not tensor.is_contiguous():
        raise ConfigError(
            f"{what} of shape {tuple(tensor.shape)} and dtype {tensor.dtype} cannot be seen as {rows} rows of "
            f"whole int32 words (contiguous: {tensor.is_contiguous()}, bytes a row: {row_bytes}, first byte: "
            f"{first_byte})"
        )
    return tensor.view(-1).view(torch.int32).view(rows, row_bytes // WORD)


@dataclass(frozen=True)
class _Piece:
    """A run of words that lies in one slot tensor and one page tensor."""

    slot_part: torch.Tensor
    slot_from: int
    page_part: torch.Tensor
    page_from: int
    words: int


class LayerStates:
    """One GDN layer: its slot tensors, and the page tensors of the attention layer whose pages it shares.

    `slot_parts` are `[slots, words_i]` and `page_parts` `[blocks, words_j]`, int32. Raises `ConfigError`
    when a page is too small for a state.
    """

    def __init__(
        self, name: str, group: int, slot_parts: Sequence[torch.Tensor], page_parts: Sequence[torch.Tensor]
    ) -> None:
        self.name = name
        self.group = group
        self.slot_parts = tuple(slot_parts)
        self.page_parts = tuple(page_parts)
        self.words = sum(part.shape[1] for part in slot_parts)
        page_words = sum(part.shape[1] for part in page_parts)
        if page_words < self.words:
            raise ConfigError(
                f"layer {name}: a state of {self.words * WORD} bytes does not fit into a page of "
                f"{page_words * WORD} bytes"
            )
        self._pieces = tuple(self._cut())

    def _cut(self) -> list[_Piece]:
        slot_ends = list(accumulate(part.shape[1] for part in self.slot_parts))
        page_ends = list(accumulate(part.shape[1] for part in self.page_parts))
        cuts = sorted({0, *slot_ends, *(end for end in page_ends if end < self.words)})
        pieces = []
        for begin, end in pairwise(cuts):
            s = next(i for i, slot_end in enumerate(slot_ends) if begin < slot_end)
            p = next(i for i, page_end in enumerate(page_ends) if begin < page_end)
            slot_from = begin - (slot_ends[s] - self.slot_parts[s].shape[1])
            page_from = begin - (page_ends[p] - self.page_parts[p].shape[1])
            pieces.append(_Piece(self.slot_parts[s], slot_from, self.page_parts[p], page_from, end - begin))
        return pieces

    def save(self, slot: int, block: int) -> None:
        """Slot to page."""
        for piece in self._pieces:
            source = piece.slot_part[slot].narrow(0, piece.slot_from, piece.words)
            piece.page_part[block].narrow(0, piece.page_from, piece.words).copy_(source)

    def restore(self, slot: int, block: int) -> None:
        """Page to slot."""
        for piece in self._pieces:
            source = piece.page_part[block].narrow(0, piece.page_from, piece.words)
            piece.slot_part[slot].narrow(0, piece.slot_from, piece.words).copy_(source)


class PageStore:
    """The bytes of one worker: all GDN layers with their slots and pages.

    `attention_pages` holds, for each attention layer, its page tensors (`[blocks, words]`, int32).
    """

    def __init__(self, layers: Sequence[LayerStates], attention_pages: Sequence[Sequence[torch.Tensor]]) -> None:
        self.layers = tuple(layers)
        self.attention_pages = tuple(tuple(parts) for parts in attention_pages)
        self.groups = 1 + max((layer.group for layer in layers), default=-1)
        self.checkpoint_bytes = sum(layer.words for layer in layers) * WORD
        """Bytes of one checkpoint over all layers."""

    def save(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy the slot into the pages of `blocks`, one per GDN group; returns the bytes copied."""
        self._check_groups(blocks)
        for layer in self.layers:
            layer.save(slot, blocks[layer.group])
        return self.checkpoint_bytes

    def restore(self, slot: int, blocks: Sequence[int]) -> int:
        """Copy the pages of `blocks` into the slot; returns the bytes copied."""
        self._check_groups(blocks)
        for layer in self.layers:
            layer.restore(slot, blocks[layer.group])
        return self.checkpoint_bytes

    def _check_groups(self, blocks: Sequence[int]) -> None:
        if len(blocks) != self.groups:
            raise StateError(f"a checkpoint needs a block for each of {self.groups} GDN groups, got {list(blocks)}")

    def zero_slot(self, slot: int) -> None:
        """Make the slot an empty state: all zero bits."""
        for layer in self.layers:
            for part in layer.slot_parts:
                part[slot].zero_()

    def zero_pages(self, blocks: Sequence[int]) -> None:
        """Zero the pages of these blocks in every attention layer."""
        for parts in self.attention_pages:
            for part in parts:
                for block in blocks:
                    part[block].zero_()

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> int:
        """Copy whole pages in every attention layer, source to target; returns the bytes copied."""
        copied = 0
        for parts in self.attention_pages:
            for part in parts:
                for source, target in copies:
                    part[target].copy_(part[source])
                copied += len(copies) * part.shape[1] * WORD
        return copied
