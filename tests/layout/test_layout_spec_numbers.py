"""The numbers of spec.txt, each from one stated memory budget."""

import pytest

from inpage.layout.geometry import Geometry, state_bytes, state_shapes
from inpage.layout.model import ModelShape
from inpage.layout.pool import (
    PoolPlan,
    blocks_for,
    largest_max_model_len,
    per_block_equivalent,
    plan_pool,
    printed_tokens,
    sessions_kept,
)

CONTEXT = 262144
# 329 shared blocks of 56 MiB end at 18,480 MiB, 176 per-block ones of 104.94 MiB begin at 18,469 MiB.
MEMORY_27B = 18475 << 20
# Qwen3.5-27B-FP8 has FP8 weights and a bf16 KV cache: 623,359 tokens are 711 blocks of 896 at 262,144
# (711 * 262,144 / 299), which no block count gives at the 1,664-token blocks of an FP8 cache.
# 711 blocks of 56 MiB take 39,816 to 39,872 MiB, 379 of 104.94 MiB take 39,772 to 39,876 MiB.
MEMORY_27B_FP8 = 39840 << 20


def test_the_state_of_a_27b_layer_is_3_207_168_bytes_in_a_page_of_896_tokens(geometry_27b: Geometry) -> None:
    assert geometry_27b.state_bytes == 48 * 128 * 128 * 4 + 3 * 10240 * 2 == 3_207_168
    assert geometry_27b.kv_bytes_per_token == 4096
    assert geometry_27b.block_tokens == 896
    assert geometry_27b.page_bytes == 3_670_016
    assert geometry_27b.padding_bytes == 462_848
    assert (geometry_27b.attention_groups, geometry_27b.gdn_groups, geometry_27b.group_size) == (1, 3, 16)
    assert geometry_27b.block_bytes == 56 << 20


def test_a_state_is_the_sum_of_its_parts(shape_27b: ModelShape) -> None:
    assert state_shapes(shape_27b) == ((3, 10240), (48, 128, 128))
    assert state_bytes([(3, 10240), (48, 128, 128)], [2, 4]) == 3_207_168


@pytest.mark.parametrize(
    ("layout", "blocks", "context", "tokens"),
    [
        ("off", 329, CONTEXT, 291_369),
        ("in-page", 329, CONTEXT, 288_446),
        ("native", 329, CONTEXT, 288_446),
        # The spec's own figure: 262,144 needs 299 blocks, so the engine had to be started at 131,072.
        ("per-block", 176, 131072, 150_775),
    ],
)
def test_one_budget_gives_the_pools_of_the_27b(geometry_27b, layout, blocks, context, tokens) -> None:
    assert blocks_for(layout, geometry_27b, MEMORY_27B) == blocks
    assert printed_tokens(blocks, geometry_27b, context, layout) == tokens


@pytest.mark.parametrize(("layout", "blocks", "tokens"), [("in-page", 711, 623_359), ("per-block", 379, 332_282)])
def test_one_budget_gives_the_pools_of_the_fp8_model(geometry_27b, layout, blocks, tokens) -> None:
    assert blocks_for(layout, geometry_27b, MEMORY_27B_FP8) == blocks
    assert printed_tokens(blocks, geometry_27b, CONTEXT, layout) == tokens


def test_an_fp8_cache_would_have_blocks_of_1664_tokens(shape_27b: ModelShape) -> None:
    geometry = Geometry.of(shape_27b, kv_dtype="fp8")
    assert geometry.block_tokens == 1664
    assert 623_359 not in {printed_tokens(n, geometry, CONTEXT, "in-page") for n in range(160, 800)}


def test_per_block_cannot_start_at_262144_and_the_plan_says_where_it_can(geometry_27b: Geometry) -> None:
    plan = plan_pool("per-block", geometry_27b, MEMORY_27B, max_model_len=CONTEXT, session_tokens=65536)
    assert (plan.blocks_per_request, plan.num_blocks, plan.printed_tokens) == (299, 176, None)
    assert plan.largest_max_model_len == 151_424
    assert printed_tokens(176, geometry_27b, 151_424, "per-block") == 152_289
    assert largest_max_model_len(329, geometry_27b, "in-page") > CONTEXT


def test_fourteen_slots_take_685_mib_on_gaudi_beside_the_pool(geometry_27b: Geometry) -> None:
    def plan(layout, engine="gaudi") -> PoolPlan:
        return plan_pool(layout, geometry_27b, MEMORY_27B, max_model_len=CONTEXT, session_tokens=65536, engine=engine)

    for layout in ("off", "in-page"):
        assert (plan(layout).slots, plan(layout).slot_bytes) == (14, 14 * 16 * 3_207_168)
    assert round(plan("in-page").slot_bytes / 2**20) == 685
    assert (plan("per-block").slots, plan("per-block").slot_bytes) == (0, 0)
    assert (plan("in-page", "cpu").slots, plan("in-page", "cpu").slot_bytes) == (5, 5 * 48 * 3_207_168)
    assert plan("native", "cpu").slots == plan("off", "cpu").slots == 0


def test_the_per_block_equivalent_of_329_shared_blocks_is_175(geometry_27b: Geometry) -> None:
    assert per_block_equivalent(329, geometry_27b) == 175
    assert per_block_equivalent(711, geometry_27b) == 379


def test_eight_sessions_to_64k_stay_in_page_and_four_stay_in_both(geometry_27b: Geometry) -> None:
    assert sessions_kept(711, geometry_27b, 65536, "in-page") == 8
    assert sessions_kept(379, geometry_27b, 65536, "per-block") == 4
    assert sessions_kept(711, geometry_27b, 65536, "off") == 0


def test_a_moe_with_two_kv_heads_and_an_fp32_state_has_1152_token_blocks(config_next) -> None:
    # Qwen3.5-35B-A3B: spec.txt's "MoE with 1152-token blocks".
    shape = ModelShape.from_config({**config_next, "model_type": "qwen3_5_moe"}, ssm_dtype="float32")
    assert Geometry.of(shape).block_tokens == 1152
