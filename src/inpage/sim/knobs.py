"""What a run varies: all of it follows from the seed, and each value can be pinned.

Sizes are drawn small, so that boundaries are crossed, the pool runs out and blocks change hands within a
few steps; what is rare on a server is common here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from inpage.errors import ConfigError
from inpage.state.grid import Grid


@dataclass(frozen=True)
class Knobs:
    """One run. Rates are chances per step; `retention` is vLLM's interval in blocks, None for dense.

    `num_blocks` counts the null block. `longest_prompt` is in tokens and at most `max_model_len` minus the
    longest output.
    """

    block_tokens: int = 64
    num_blocks: int = 60
    budget: int = 96
    max_num_seqs: int = 4
    max_model_len: int = 1024
    longest_prompt: int = 700
    longest_output: int = 150
    asynchronous: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    retention: int | None = None
    chunk_limit: int = 0
    """vLLM's `long_prefill_token_threshold`; 0 is none."""
    mark_tokens: int = 0
    """vLLM's `prefix_match_unit`: hits inside a block; 0 is none."""
    reserve_whole_prompt: bool = False
    """vLLM's `scheduler_reserve_full_isl`."""
    sessions: int = 6
    salts: int = 0
    """How many cache salts beside none; a salt is part of the state here, so that a shared hit shows."""
    adapters: int = 0
    abort_rate: float = 0.0
    force_preempt_rate: float = 0.0
    """`reset_prefix_cache(reset_running_requests=True)`: everything running is preempted at once."""
    busy_reset_rate: float = 0.0
    """`reset_prefix_cache()` while requests run, which vLLM refuses."""
    idle_rate: float = 0.0
    """The server runs empty; half the time its cache is then reset."""
    drain_rate: float = 0.01
    """The step in flight is awaited before the next is scheduled; every servable page is checked then."""

    @property
    def blocks_of_longest(self) -> int:
        """Blocks that a request of `max_model_len` needs at once."""
        return Grid(self.block_tokens, self.mark_tokens or self.block_tokens).blocks_at_once(self.max_model_len, 3)


def draw(seed: int, *, small_budgets: bool = True) -> Knobs:
    """The knobs of a seed. `small_budgets` allows budgets below a block, where 0.26.0 schedules no prefill."""
    source = random.Random(f"knobs {seed}")
    block = source.choice([16, 16, 32, 32, 64, 64, 128])
    seqs = source.choice([1, 2, 3, 4, 4, 5, 6, 8])
    longest_prompt = block * source.choice([3, 5, 8, 11]) + source.randrange(block)
    longest_output = source.choice([3, block // 2, block + 5, 3 * block])
    max_model_len = -(-(longest_prompt + longest_output + 1) // block) * block
    # A source of its own: the rest of a seed is what it was before there were marks.
    mark = random.Random(f"marks {seed}").choice([0, 0, block // 8, block // 4, block // 2])
    budgets = [block, block + seqs, block + block // 2, 2 * block, 2 * block + seqs, 4 * block]
    if small_budgets:
        budgets += [block // 2, block - 1]
    budget = max(source.choice(budgets), seqs)
    policy: Literal["fcfs", "priority"] = source.choice(["fcfs", "priority", "priority"])
    needed = Grid(block, mark or block).blocks_at_once(max_model_len, 3)
    num_blocks = 1 + needed + source.choice([0, 0, 1, 2, 4, needed // 3, needed, 4 * needed])
    return Knobs(
        block_tokens=block,
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=seqs,
        max_model_len=max_model_len,
        longest_prompt=longest_prompt,
        longest_output=longest_output,
        asynchronous=source.random() < 0.5,
        policy=policy,
        retention=source.choice([None, None, 0, 0, 1, 2, 3]),
        # Below a block it starves on 0.26.0 like a small budget.
        chunk_limit=source.choice([0, 0, 0, block, 2 * block, *([block // 2] if small_budgets else [])]),
        reserve_whole_prompt=source.random() < 0.3,
        mark_tokens=mark,
        sessions=seqs + source.choice([0, 1, 2, 4]),
        salts=source.choice([0, 0, 1, 2]),
        adapters=source.choice([0, 0, 0, 1, 2]),
        abort_rate=source.choice([0.0, 0.01, 0.05]),
        force_preempt_rate=source.choice([0.0, 0.0, 0.003, 0.01]),
        busy_reset_rate=source.choice([0.0, 0.01]),
        idle_rate=source.choice([0.0, 0.002]),
    )


def pinned(knobs: Knobs, values: Mapping[str, str]) -> Knobs:
    """The knobs with some values replaced, given as text; raises `ConfigError` for what is no knob or no value."""
    changes: dict[str, Any] = {}
    known = {field.name for field in fields(Knobs)}
    for name, text in values.items():
        if name not in known:
            raise ConfigError(f"{name!r} is no knob of the simulator; there are {', '.join(sorted(known))}")
        changes[name] = _parse(name, text, getattr(knobs, name))
    return replace(knobs, **changes)


def _parse(name: str, text: str, old: object) -> object:
    choices: dict[str, object] = {"true": True, "false": False, "none": None}
    try:
        if isinstance(old, bool) or (name == "retention" and text.lower() == "none"):
            return choices[text.lower()]
        if isinstance(old, float):
            return float(text)
        if name == "policy":
            return {"fcfs": "fcfs", "priority": "priority"}[text]
        return int(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is no value for the knob {name}, which is {old!r} otherwise") from None
