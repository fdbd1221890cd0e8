"""What `inpage plan` says of a recipe, from the same arithmetic."""

from __future__ import annotations

from typing import Any

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import PoolPlan, plan_pool
from inpage.recipes.schema import Expected, Recipe

SESSION_TOKENS = 65536
ENGINE = {"gaudi2": "gaudi", "cpu": "cpu"}


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The keys of the model's config.json that matter here; raises `ConfigError` for sizes that make no model."""
    if recipe.geometry is not None:
        return recipe.geometry.config
    from inpage.demo.model import DemoModel

    try:
        made = DemoModel(**(recipe.made or {}))
    except TypeError as error:
        raise ConfigError(f"recipe {recipe.name}, made: {error}") from error
    return {
        "model_type": "qwen3_next",
        "layer_types": made.layer_types,
        "num_key_value_heads": made.kv_heads,
        "head_dim": made.head_dim,
        "linear_num_key_heads": made.key_heads,
        "linear_num_value_heads": made.value_heads,
        "linear_key_head_dim": made.state_dim,
        "linear_value_head_dim": made.state_dim,
        "linear_conv_kernel_dim": made.conv_kernel,
    }


def planned(recipe: Recipe) -> tuple[Geometry, PoolPlan]:
    """Geometry and in-page pool of one rank, from the recipe's own flags; raises `ConfigError`."""
    ssm_dtype = recipe.value("--mamba-ssm-cache-dtype")
    shape = ModelShape.from_config(
        model_config(recipe),
        ssm_dtype=None if ssm_dtype is None else str(ssm_dtype),
        source=f"recipe {recipe.name}, geometry",
    )
    geometry = Geometry.of(
        shape,
        kv_dtype=str(recipe.value("--kv-cache-dtype") or "auto"),
        tp=_number(recipe, "--tensor-parallel-size", 1),
    )
    plan = plan_pool(
        "in-page",
        geometry,
        recipe.pool.memory_bytes,
        max_model_len=_number(recipe, "--max-model-len"),
        session_tokens=session_tokens(recipe),
        engine=ENGINE[recipe.device],
        max_num_seqs=_number(recipe, "--max-num-seqs"),
    )
    return geometry, plan


def session_tokens(recipe: Recipe) -> int:
    """Length of the sessions that `sessions_64k` counts: 65,536 tokens, or max-model-len if that is less."""
    return min(SESSION_TOKENS, _number(recipe, "--max-model-len"))


def expected(recipe: Recipe) -> Expected:
    """The figures that the file should have; raises `ConfigError` when vLLM would not start with its flags."""
    geometry, plan = planned(recipe)
    if plan.printed_tokens is None:
        raise ConfigError(
            f"recipe {recipe.name}: vLLM does not start at --max-model-len {recipe.value('--max-model-len')} with a "
            f"pool of {recipe.pool.memory}; the largest that fits is {plan.largest_max_model_len}"
        )
    return Expected(
        block_tokens=geometry.block_tokens,
        state_bytes=geometry.state_bytes,
        page_bytes=geometry.page_bytes,
        block_bytes=geometry.block_bytes,
        num_blocks=plan.num_blocks,
        printed_tokens=plan.printed_tokens,
        sessions_64k=plan.sessions,
        slots=plan.slots,
        slot_bytes=plan.slot_bytes,
    )


def differences(recipe: Recipe) -> list[str]:
    """Where the file and the plan differ, a line each."""
    stated, plan = recipe.expected.model_dump(), expected(recipe).model_dump()
    return [f"{key}: the file says {stated[key]:,}, the plan {plan[key]:,}" for key in plan if stated[key] != plan[key]]


def _number(recipe: Recipe, flag: str, otherwise: int | None = None) -> int:
    value = recipe.value(flag)
    value = otherwise if value is None else value
    if not isinstance(value, int):
        raise ConfigError(f"recipe {recipe.name}: the plan needs {flag} as a whole number, not {value!r}")
    return value
