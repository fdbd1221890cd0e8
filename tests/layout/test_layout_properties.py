"""What holds for every model, budget and TP size."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from inpage.layout.geometry import KV_BYTES, Geometry
from inpage.layout.model import SSM_BYTES, ModelShape
from inpage.layout.pool import (
    LAYOUTS,
    blocks_for,
    blocks_per_request,
    largest_max_model_len,
    per_block_equivalent,
    plan_pool,
    printed_tokens,
)

shapes = st.builds(
    ModelShape,
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 128, 256]),
    key_heads=st.sampled_from([8, 16, 32]),
    value_heads=st.sampled_from([16, 32, 48, 64]),
    key_dim=st.sampled_from([64, 128]),
    value_dim=st.sampled_from([64, 128]),
    conv_kernel=st.integers(2, 5),
    attention_layers=st.integers(1, 24),
    gdn_layers=st.integers(1, 80),
    ssm_dtype=st.sampled_from(list(SSM_BYTES)),
    model_type=st.just("qwen3_5_text"),
)
geometries = st.builds(
    lambda shape, kv_dtype, tp, alignment: Geometry.of(shape, kv_dtype=kv_dtype, tp=tp, alignment=alignment),
    shapes,
    st.sampled_from(list(KV_BYTES)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([16, 32, 64, 128, 256]),
)
memories = st.integers(1, 1 << 40)


@given(shapes, st.sampled_from([16, 32, 128, 256]))
def test_the_block_is_the_smallest_multiple_of_the_alignment_whose_page_holds_a_state(
    shape: ModelShape, alignment: int
) -> None:
    geometry = Geometry.of(shape, alignment=alignment)
    assert geometry.block_tokens % alignment == 0
    assert geometry.page_bytes >= geometry.state_bytes
    assert geometry.page_bytes - alignment * geometry.kv_bytes_per_token < geometry.state_bytes
    assert geometry.padding_bytes == geometry.page_bytes - geometry.state_bytes


@given(geometries)
def test_every_layer_has_a_place_in_a_group(geometry: Geometry) -> None:
    assert geometry.gdn_groups * geometry.gdn_layers_per_group >= geometry.gdn_layers
    assert geometry.attention_groups * geometry.group_size >= geometry.attention_layers
    assert geometry.block_bytes <= geometry.page_bytes * geometry.group_size


@given(geometries, memories)
def test_sharing_pages_never_has_fewer_blocks_than_per_block_tensors(geometry: Geometry, memory: int) -> None:
    shared, per_block = (blocks_for(layout, geometry, memory) for layout in ("in-page", "per-block"))
    assert shared == blocks_for("native", geometry, memory) == blocks_for("off", geometry, memory)
    # At most twice as many and the rounding, because a state is no larger than its page.
    assert per_block <= shared <= 2 * per_block + 1
    assert per_block_equivalent(shared, geometry) <= per_block


@given(geometries, memories, memories, st.sampled_from(LAYOUTS))
def test_more_memory_never_gives_less(geometry: Geometry, a: int, b: int, layout) -> None:
    less, more = (
        plan_pool(layout, geometry, memory, max_model_len=32768, session_tokens=8192) for memory in sorted((a, b))
    )
    assert less.num_blocks <= more.num_blocks
    assert less.sessions <= more.sessions
    assert less.largest_max_model_len <= more.largest_max_model_len
    assert (less.printed_tokens or 0) <= (more.printed_tokens or 0)


@given(geometries, st.integers(2, 5000), st.sampled_from(LAYOUTS))
def test_the_largest_max_model_len_fits_and_one_token_more_does_not(
    geometry: Geometry, num_blocks: int, layout
) -> None:
    largest = largest_max_model_len(num_blocks, geometry, layout)
    assume(largest > 0)
    assert blocks_per_request(layout, geometry, largest) <= num_blocks - 1
    assert blocks_per_request(layout, geometry, largest + 1) > num_blocks - 1
    assert printed_tokens(num_blocks, geometry, largest, layout) >= largest


@given(shapes, st.sampled_from([2, 4, 8]))
def test_a_rank_of_tp_has_its_share_of_state_and_kv(shape: ModelShape, tp: int) -> None:
    whole, rank = Geometry.of(shape), Geometry.of(shape, tp=tp)
    assert rank.state_bytes * tp == whole.state_bytes
    assert rank.kv_bytes_per_token * min(tp, shape.kv_heads) == whole.kv_bytes_per_token
    assert (rank.gdn_groups, rank.group_size) == (whole.gdn_groups, whole.group_size)


@given(shapes)
def test_an_fp8_cache_halves_the_kv_and_leaves_the_state(shape: ModelShape) -> None:
    bf16, fp8 = Geometry.of(shape), Geometry.of(shape, kv_dtype="fp8")
    assert 2 * fp8.kv_bytes_per_token == bf16.kv_bytes_per_token
    assert fp8.state_bytes == bf16.state_bytes


@given(shapes)
def test_a_16_bit_ssm_matrix_never_needs_a_larger_block(shape: ModelShape) -> None:
    half, full = (Geometry.of(replace(shape, ssm_dtype=dtype)) for dtype in ("bfloat16", "float32"))
    assert half.block_tokens <= full.block_tokens
