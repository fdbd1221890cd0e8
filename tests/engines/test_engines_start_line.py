"""The words of the start line for every way of keeping checkpoints."""

from __future__ import annotations

import pytest

from inpage.engines.start import cached, shortest_hit
from inpage.state.grid import Grid


@pytest.mark.parametrize(
    ("grid", "retention", "words", "shortest"),
    [
        (Grid(528, 528), None, "checkpoints at every multiple of 528 tokens (retention dense)", 529),
        (
            Grid(528, 528),
            0,
            "checkpoints at a prompt's last multiple of 528 tokens and where prompts part (retention sparse)",
            529,
        ),
        (
            Grid(256, 256),
            "1024",
            "checkpoints at every multiple of 1024 tokens and a prompt's last of 256 (retention 1024)",
            257,
        ),
        (
            Grid(256, 64),
            None,
            "checkpoints at every multiple of 256 tokens (retention dense), and at a prompt's last multiple of 64",
            65,
        ),
    ],
)
def test_the_start_line_says_what_is_cached_and_the_shortest_prompt_that_can_hit(grid, retention, words, shortest):
    assert cached(grid, retention) == words
    assert shortest_hit(grid) == shortest
