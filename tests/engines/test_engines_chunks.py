"""Hits and cold runs under budgets of one, two and three blocks, alone and beside a decode, on vLLM for CPU.

What holds on any processor: a hit equals the cold run whose chunks end where the hit's do, to the bit. Against a cold
run with other ends it may drift where products round by their shape, and then no more than cold runs do.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

BLOCK = 256


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["one block", "two blocks", "three blocks"])
def rows(request, engine_run):
    run = engine_run("budgets", {"budget": request.param}, INPAGE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return request.param, run["result"]


def test_alone_a_hit_equals_the_cold_run_with_its_chunk_ends(rows):
    _, rows = rows
    for row in rows:
        hit = row["hit"]
        assert hit["cached"] >= BLOCK
        assert hit["cold ends"][-len(hit["ends"]) :] == hit["ends"]
        assert hit["same ends"], row


def test_alone_a_hit_drifts_no_more_than_a_cold_run_with_other_ends(rows):
    blocks, rows = rows
    for row in rows:
        assert row["hit"]["drift"] <= row["cold drift"], row
        if blocks == 1:
            assert row["hit"]["equal"], "one block a chunk: there are no other ends"


def test_beside_a_decode_a_hit_drifts_no_more_than_a_cold_run_does_there(rows):
    """The same request decodes beside both: batches have the same shapes where the chunks have."""
    _, rows = rows
    for row in rows:
        assert row["beside"]["cached"] >= BLOCK
        assert row["beside"]["drift"] <= max(row["cold drift"], row["cold drift beside"]), row
