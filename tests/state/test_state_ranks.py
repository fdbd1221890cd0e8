"""All tensor-parallel ranks agree on the slots, whatever the order in which each iterates its sets."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("state_rank.py")
SEEDS = ["0", "1", "2", "3"]


def ranks(*arguments: str) -> list[list[tuple[dict[str, int], list[int]]]]:
    """Slot map and free list of each rank after each step; one process and one hash seed per rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), *arguments],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(SEEDS)
    return [json.loads(text) for text in printed]


@pytest.fixture(scope="module")
def agreed():
    return ranks()


def test_all_ranks_have_the_same_slot_map_and_free_list_after_every_step(agreed):
    for rank in agreed[1:]:
        for step, (mine, first) in enumerate(zip(rank, agreed[0], strict=True)):
            assert mine == first, f"ranks disagree after step {step}"


def test_the_day_hands_several_slots_back_in_one_step(agreed):
    held = [set(slot_map) for slot_map, _ in agreed[0]]
    assert max(len(before - after) for before, after in pairwise(held)) >= 2


def test_without_the_sorting_of_hand_backs_ranks_would_disagree():
    first, *others = ranks("unsorted")
    assert any(rank != first for rank in others)
