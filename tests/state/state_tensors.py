"""A toy model in real tensors for the tests of `state.pages`: slots, pages, a delta rule and an attention.

The recurrence has the shape of `ops/gated_delta_rule/naive.py` in flash-linear-attention (a conv window, then
decay, delta, read-out) but computes on the bits, as unsigned words that wrap around: it is exact, and every
word of a state depends on every token. Read as floats, the states are full of NaNs; one entry of each head is
always a signalling NaN with the history in its payload, one is -0.0. A copy that does arithmetic changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from state_toy import GROUPS, VOCABULARY, OracleMismatch, Server

from inpage.state.ledger import NULL_BLOCK
from inpage.state.pages import LayerStates, PageStore, rows_of_words

Words = npt.NDArray[np.uint32]

BLOCK_TOKENS = 24
ATTENTION_LAYERS = 2
LAYERS = GROUPS * ATTENTION_LAYERS
"""GDN layers; layer i of every group shares the pages of attention layer i."""
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 8
TAPS = 3
"""Tokens in the conv window, which with the present token make a kernel of 4."""
CHANNELS = HEADS * (2 * KEY_DIM + VALUE_DIM)

CONV_WORDS = TAPS * CHANNELS // 2
SSM_WORDS = HEADS * KEY_DIM * VALUE_DIM
STATE_WORDS = CONV_WORDS + SSM_WORDS

SIGNALLING_NAN = 0x7F800001
PAYLOAD = 0x003FFFFE
NEGATIVE_ZERO = 0x80000000
GARBAGE = 0x7FA5A5A5
"""What uninitialised memory holds: signalling NaNs, as float32 and as bfloat16."""

_source = np.random.default_rng(0)
EMBEDDING = _source.integers(0, 2**16, (VOCABULARY, LAYERS, CHANNELS), np.uint16)
EMBEDDING[..., 0] = 0x7F81  # a signalling NaN in bfloat16
EMBEDDING[..., 1] = 0x8000  # -0.0
KERNEL = _source.integers(0, 2**32, (TAPS + 1, 1), np.uint32)


# --------------------------------------------------------------------------------- the recurrence
def token_step(state: Words, token: int) -> tuple[Words, bytes]:
    """One token through all GDN layers: `[LAYERS, STATE_WORDS]` -> the same, and the output."""
    conv = state[:, :CONV_WORDS].view(np.uint16).reshape(LAYERS, TAPS, CHANNELS)
    s = state[:, CONV_WORDS:].reshape(LAYERS, HEADS, KEY_DIM, VALUE_DIM)

    window = np.concatenate([conv, EMBEDDING[token][:, None]], axis=1)
    mixed = (window * KERNEL).sum(axis=1, dtype=np.uint32).reshape(LAYERS, HEADS, -1)
    q, k, v = np.split(mixed, [KEY_DIM, 2 * KEY_DIM], axis=-1)
    decay = (mixed[..., :1, None] | 1).astype(np.uint32)

    s = s * decay
    v = v - (s * k[..., None]).sum(axis=-2, dtype=np.uint32)
    s = s + k[..., None] * v[..., None, :]
    output = (s * q[..., None]).sum(axis=-2, dtype=np.uint32)

    s[..., 0, 0] = SIGNALLING_NAN | (s[..., 0, 0] & PAYLOAD)
    s[..., 0, 1] = NEGATIVE_ZERO
    new_conv = np.ascontiguousarray(window[:, 1:]).reshape(LAYERS, -1).view(np.uint32)
    return np.concatenate([new_conv, s.reshape(LAYERS, -1)], axis=1), output.tobytes()


def fold(state: Words, tokens: Sequence[int]) -> tuple[Words, list[bytes]]:
    """The readable reference: tokens one by one through the recurrence, from any initial state."""
    outputs = []
    for token in tokens:
        state, output = token_step(state, token)
        outputs.append(output)
    return state, outputs


def empty_state() -> Words:
    """The state before the first token."""
    return np.zeros((LAYERS, STATE_WORDS), np.uint32)


@cache
def cold(tokens: tuple[int, ...]) -> tuple[Words, bytes]:
    """State and GDN output after a cold run; each prefix is computed once for all tests."""
    if not tokens:
        return empty_state(), b""
    return token_step(cold(tokens[:-1])[0], tokens[-1])


# ---------------------------------------------------------------------------------- the attention
def keys_and_values(tokens: Sequence[int], layer: int, row: Row) -> tuple[npt.NDArray[np.float32], ...]:
    """K `[tokens, row.key]` and V `[tokens, row.value]`: small whole numbers, so that sums are exact."""
    column = np.asarray(tokens)[:, None] + layer
    key = (column * np.arange(1, row.key + 1)) % 3
    value = (column * np.arange(1, row.value + 1)) % 5
    return key.astype(np.float32), value.astype(np.float32)


def attend(keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32], length: int) -> bytes:
    """Linear attention over whole pages; rows from `length` on get weight 0, and 0 times NaN is NaN."""
    with np.errstate(invalid="ignore"):
        weights = keys.sum(axis=1) * (np.arange(len(keys)) < length)
        return (weights[:, None] * values).sum(axis=0, dtype=np.float32).tobytes()


# ------------------------------------------------------------------------------------- the memory
class Row(NamedTuple):
    """Words of one token in K's and in V's part of a page."""

    key: int
    value: int


BORDERS = {
    "border in the ssm matrix": Row(5, 5),
    "border in the conv window": Row(2, 8),
    "border between conv and ssm": Row(3, 7),
    "state in K alone": Row(9, 1),
}
"""Where the border of K and V in a page cuts the state. Behind the state, each page has 40 words of padding."""


@dataclass(frozen=True)
class Layout:
    """How slots and pages are cut into tensors."""

    one_page_tensor: bool = False
    one_slot_tensor: bool = False
    border: str = "border in the ssm matrix"

    @property
    def row(self) -> Row:
        """Words of K and V in a page's rows."""
        return BORDERS[self.border]

    def __str__(self) -> str:
        pages = "kv-as-one" if self.one_page_tensor else "k-and-v"
        return pages + (",state-as-one" if self.one_slot_tensor else ",conv-and-ssm")


LAYOUTS = [Layout(pages, slots) for pages in (False, True) for slots in (False, True)]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of uninitialised memory."""
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.view(-1).view(torch.int32).fill_(GARBAGE)
    return tensor


class TensorWorld:
    """The toy model on slots and pages in tensors, with the real `PageStore`."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, layout: Layout, num_blocks: int, slots: int) -> None:
        self.row = layout.row
        self.page_tensors = [self._pages(layout, num_blocks) for _ in range(ATTENTION_LAYERS)]
        pages = [[rows_of_words(part, num_blocks, "pages") for part in parts] for parts in self.page_tensors]
        layers = []
        for group in range(GROUPS):
            for index in range(ATTENTION_LAYERS):
                parts = [rows_of_words(part, slots + 1, "slots") for part in self._slots(layout, slots + 1)]
                layers.append(LayerStates(f"gdn {group}.{index}", group, parts, pages[index]))
        self.store = PageStore(layers, pages)
        self._null_pages = self.page_words(NULL_BLOCK)

    @staticmethod
    def _pages(layout: Layout, num_blocks: int) -> list[torch.Tensor]:
        row = layout.row
        if layout.one_page_tensor:
            return [filled((num_blocks, BLOCK_TOKENS * (row.key + row.value)), torch.float32)]
        return [filled((num_blocks, BLOCK_TOKENS, words), torch.float32) for words in row]

    @staticmethod
    def _slots(layout: Layout, slots: int) -> list[torch.Tensor]:
        if layout.one_slot_tensor:
            return [filled((slots, 1, STATE_WORDS * 4), torch.int8)]
        return [
            filled((slots, TAPS, CHANNELS), torch.bfloat16),
            filled((slots, HEADS, KEY_DIM, VALUE_DIM), torch.float32),
        ]

    def keys_and_values_of(self, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Views of all pages of an attention layer as K `[blocks, tokens, words]` and V the same."""
        parts = [part.numpy() for part in self.page_tensors[layer]]
        if len(parts) == 1:
            parts = np.split(parts[0], [BLOCK_TOKENS * self.row.key], axis=1)
        key, value = parts
        return (
            key.reshape(len(key), BLOCK_TOKENS, self.row.key),
            value.reshape(len(value), BLOCK_TOKENS, self.row.value),
        )

    # slots and pages as words
    def slot_words(self, slot: int) -> Words:
        """A copy of the slot, `[LAYERS, STATE_WORDS]`."""
        rows = [torch.cat([part[slot] for part in layer.slot_parts]) for layer in self.store.layers]
        return torch.stack(rows).numpy().view(np.uint32)

    def write_slot(self, slot: int, state: Words) -> None:
        """Put a state into the slot."""
        for layer, words in zip(self.store.layers, torch.from_numpy(state.view(np.int32)), strict=True):
            sizes = [part.shape[1] for part in layer.slot_parts]
            for part, piece in zip(layer.slot_parts, words.split(sizes), strict=True):
                part[slot] = piece

    def page_words(self, block: int) -> Words:
        """A copy of the block's pages, `[ATTENTION_LAYERS, words]`."""
        rows = [torch.cat([part[block] for part in parts]) for parts in self.store.attention_pages]
        return torch.stack(rows).numpy().view(np.uint32)

    # World
    def forward(self, slot: int, position: int, tokens: Sequence[int], attention: Sequence[int]) -> list[bytes]:
        state, outputs = fold(self.slot_words(slot), tokens)
        self.write_slot(slot, state)
        end = position + len(tokens)
        blocks = np.asarray(attention[: -(-end // BLOCK_TOKENS)])
        here = np.arange(position, end)
        for layer in range(ATTENTION_LAYERS):
            keys, values = self.keys_and_values_of(layer)
            block, row = blocks[here // BLOCK_TOKENS], here % BLOCK_TOKENS
            keys[block, row], values[block, row] = keys_and_values(tokens, layer, self.row)
            read = keys[blocks].reshape(-1, self.row.key), values[blocks].reshape(-1, self.row.value)
            outputs = [output + attend(*read, length) for output, length in zip(outputs, here + 1, strict=True)]
        return outputs

    def state(self, slot: int) -> bytes:
        if (self.page_words(NULL_BLOCK) != self._null_pages).any():
            raise OracleMismatch("the null block was written")
        return self.slot_words(slot).tobytes()

    def cold_state(self, tokens: tuple[int, ...]) -> bytes:
        return cold(tokens)[0].tobytes()

    def cold_output(self, tokens: tuple[int, ...]) -> bytes:
        return cold(tokens)[1] + cold_attention(tokens, self.row)


def toy_server(layout: Layout, num_blocks: int = 40, slots: int = 4) -> Server:
    """A server over a new `TensorWorld`; 26 blocks are few enough that the pool evicts and preempts."""
    return Server(TensorWorld(layout, num_blocks, slots), num_blocks, slots)


@cache
def cold_attention(tokens: tuple[int, ...], row: Row) -> bytes:
    """The attention layers' output for the last token, without pages."""
    layers = [attend(*keys_and_values(tokens, layer, row), len(tokens)) for layer in range(ATTENTION_LAYERS)]
    return b"".join(layers)
