"""What will go wrong with a plan, in words; None when nothing will."""

from __future__ import annotations

from inpage.layout.geometry import Geometry
from inpage.layout.pool import PoolPlan, printed_tokens


def start_warning(plan: PoolPlan, geometry: Geometry, max_model_len: int) -> str | None:
    """For a pool that cannot hold one request of max-model-len: how long one may be."""
    if plan.printed_tokens is not None:
        return None
    if fits := plan.largest_max_model_len:
        tokens = printed_tokens(plan.num_blocks, geometry, fits, plan.layout)
        remedy = f"the largest that fits is {fits:,}, where vLLM prints {tokens:,} tokens"
    else:
        remedy = "no length fits, give it more memory"
    return (
        f"{plan.layout} cannot start at this max-model-len ({max_model_len:,}): needs "
        f"{plan.blocks_per_request:,} blocks, has {plan.num_blocks:,}, one of them the null block; {remedy}."
    )


def prompt_warning(geometry: Geometry, typical_prompt: int, mark_tokens: int | None = None) -> str | None:
    """Prompts below a block, or below a mark, reach no checkpoint, so they neither write nor find one."""
    kind, unit = ("mark", mark_tokens) if mark_tokens else ("block", geometry.block_tokens)
    if typical_prompt >= unit:
        return None
    return f"Prompts of {typical_prompt:,} tokens are shorter than a {kind} of {unit:,}: they never hit."


def budget_warning(geometry: Geometry, max_num_batched_tokens: int, max_num_seqs: int) -> str | None:
    """What the token budget does to chunks that must end on a boundary.

    From `_mamba_block_aligned_split` (0.30.0): what running decodes leave of the budget is cut down to
    whole blocks, unless the whole budget is below a block.
    """
    budget, block, decodes = max_num_batched_tokens, geometry.block_tokens, max_num_seqs - 1
    if budget < block:
        return (
            f"The token budget of {budget:,} is below a block of {block:,}: vLLM 0.26.0 schedules no "
            "prefill at all, 0.30.0 takes several steps to each checkpoint."
        )
    if budget - decodes < block:
        return (
            f"The token budget of {budget:,} has no room for a block of {block:,} beside {decodes} decodes: "
            f"prefill waits until they end; give it {block + decodes:,} or more."
        )
    if (rest := budget % block) > decodes:
        return (
            f"The token budget of {budget:,} is not a multiple of the block of {block:,}: a prefill chunk "
            f"uses {budget - rest:,} of it, the other {rest:,} serve decodes and last chunks only."
        )
    return None
