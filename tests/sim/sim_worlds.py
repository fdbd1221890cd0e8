"""Small worlds for the scenarios: blocks of 16 tokens, and prompts that are prefixes of each other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from inpage.sim.folds import VOCABULARY
from inpage.sim.knobs import Knobs
from inpage.sim.world import World

B = 16
SMALL = Knobs(
    block_tokens=B, num_blocks=80, budget=2 * B + 4, max_num_seqs=4, max_model_len=16 * B, longest_prompt=12 * B
)


def small_world(**changes: Any) -> World:
    return World(replace(SMALL, **changes))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def finish(world: World, name: str, tokens: list[int], output_tokens: int = 1, **options: Any) -> list[int]:
    """Run one request alone to its end; returns where it started (more than once after preemption)."""
    entry = world.submit(name, tokens, output_tokens, **options)
    world.run_until_idle()
    return entry.starts


def preempt(world: World, name: str) -> None:
    """What the scheduler does to a running request when the pool is dry."""
    request = world.entries[name].request
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)


def step_until(world: World, done: Any, limit: int = 500) -> None:
    for _ in range(limit):
        if done():
            return
        world.step()
    raise AssertionError(f"not within {limit} steps")
