"""Saves and restores at the 27B geometry against a plain contiguous `copy_` of the same bytes.

48 GDN layers in three groups over 16 attention layers, states of 3,207,168 bytes, pages of 3.5 MiB: a checkpoint
is 147 MiB. Once with K and V, conv window and ssm matrix in tensors of their own (Gaudi), once in one each (CPU).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.timing import in_turns
from inpage.layout.geometry import Geometry
from inpage.state.pages import LayerStates, PageStore, rows_of_words

GEOMETRY_27B = Geometry(
    state_bytes=3_207_168, kv_bytes_per_token=4096, block_tokens=896, attention_layers=16, gdn_layers=48
)
CONV_BYTES = 3 * 10240 * 2
BLOCKS, SLOTS, ROUNDS = 7, 3, 15


def make_store(page_parts: int, split_state: bool) -> PageStore:
    """Random bytes in slots and pages of the geometry."""
    g = GEOMETRY_27B
    attention = [
        [torch.randint(-128, 127, (BLOCKS, g.page_bytes // page_parts), dtype=torch.int8) for _ in range(page_parts)]
        for _ in range(g.attention_layers)
    ]
    pages = [[rows_of_words(part, BLOCKS, "pages") for part in parts] for parts in attention]
    sizes = [CONV_BYTES, g.state_bytes - CONV_BYTES] if split_state else [g.state_bytes]
    layers = []
    for layer in range(g.gdn_layers):
        slots = [torch.randint(-128, 127, (SLOTS, size), dtype=torch.int8) for size in sizes]
        words = [rows_of_words(part, SLOTS, "slots") for part in slots]
        layers.append(LayerStates(f"gdn{layer}", layer // 16, words, pages[layer % 16]))
    return PageStore(layers, pages)


def rows() -> Iterator[tuple[str, ...]]:
    """One row per direction and arrangement."""
    for page_parts, split_state, where in ((2, True, "Gaudi: K, V, conv, ssm apart"), (1, False, "CPU: one tensor")):
        store = make_store(page_parts, split_state)
        source = torch.randint(-128, 127, (store.checkpoint_bytes,), dtype=torch.int8)
        target = torch.empty_like(source)

        def plain(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source)

        for name, copy in (("save", store.save), ("restore", store.restore)):
            mine, theirs = in_turns(lambda copy=copy: copy(1, (1, 3, 5)), plain, ROUNDS)  # type: ignore[misc]
            gib = store.checkpoint_bytes / 2**30
            yield (
                f"{name}, 27B, {where}",
                f"{gib / mine:.2f} GiB/s",
                f"contiguous copy_ {gib / theirs:.2f} GiB/s",
                f"{theirs / mine:.2f}",
                "at least 0.70",
            )
