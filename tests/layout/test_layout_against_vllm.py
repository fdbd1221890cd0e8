"""The same numbers from vLLM's own code."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CacheConfig  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import (  # noqa: E402
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from inpage.layout.geometry import Geometry, state_shapes  # noqa: E402
from inpage.layout.model import ModelShape  # noqa: E402
from inpage.layout.pool import blocks_for, plan_pool, sessions_kept  # noqa: E402

SSM = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def vllm_shapes(shape: ModelShape, tp: int = 1) -> tuple[tuple[int, ...], ...]:
    return MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp,
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        shape.conv_kernel,
    )


def vllm_dtypes(shape: ModelShape) -> tuple[Any, Any]:
    return MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", shape.ssm_dtype)


def vllm_specs(shape: ModelShape, geometry: Geometry, cache_mode: str, kv_dtype: str = "auto", tp: int = 1):
    attention = FullAttentionSpec(
        block_size=geometry.block_tokens,
        num_kv_heads=max(1, shape.kv_heads // tp),
        head_size=shape.head_dim,
        dtype=KV[kv_dtype],
    )
    gdn = MambaSpec(
        block_size=geometry.block_tokens,
        shapes=vllm_shapes(shape, tp),
        dtypes=vllm_dtypes(shape),
        page_size_padded=geometry.page_bytes,
        mamba_cache_mode=cache_mode,
    )
    return attention, gdn


def vllm_pool(shape: ModelShape, geometry: Geometry, memory: int, max_model_len: int, mode: str = "align"):
    """vLLM's cache config and printed tokens for a budget; it raises where the engine would not start."""
    attention, gdn = vllm_specs(shape, geometry, mode)
    layers = {f"layers.{i}.attn": attention for i in range(shape.attention_layers)}
    layers |= {f"layers.{100 + i}.gdn": gdn for i in range(shape.gdn_layers)}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_cache_mode=mode,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len, original_max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    cache = get_kv_cache_configs(config, [layers], [memory])[0]
    return cache, get_kv_cache_capacity(config, cache)[0]


@pytest.mark.parametrize("ssm_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_state_shapes_and_bytes_are_vllms_at_every_tp(config_27b, config_next, tp: int, ssm_dtype) -> None:
    for config in (config_27b, config_next):
        shape = ModelShape.from_config(config, ssm_dtype=ssm_dtype)
        geometry = Geometry.of(shape, tp=tp)
        assert state_shapes(shape, tp) == vllm_shapes(shape, tp)
        assert vllm_dtypes(shape) == (torch.bfloat16, SSM[ssm_dtype])
        attention, gdn = vllm_specs(shape, geometry, "align", tp=tp)
        assert gdn.state_content_size_bytes == geometry.state_bytes
        assert attention.page_size_bytes == gdn.page_size_bytes == geometry.page_bytes


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("alignment", [32, 128])
def test_the_block_is_the_one_that_vllms_cpu_platform_aligns_to(
    config_27b, config_next, monkeypatch, kv_dtype: str, tp: int, alignment: int
) -> None:
    for config, ssm_dtype in ((config_27b, None), (config_next, None), (config_next, "float32")):
        shape = ModelShape.from_config(config, ssm_dtype=ssm_dtype)
        model = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda _, shape=shape: vllm_shapes(shape, tp),
            get_mamba_state_dtype_from_config=lambda _, shape=shape: vllm_dtypes(shape),
        )
        monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, model=model, **__: (model, ""))
        cache_config = CacheConfig(block_size=alignment, cache_dtype=kv_dtype, mamba_cache_mode="align")
        model_config = SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=False,
            get_num_kv_heads=lambda _, shape=shape: max(1, shape.kv_heads // tp),
            get_head_size=lambda shape=shape: shape.head_dim,
            architecture="any",
        )
        config_stub = SimpleNamespace(
            cache_config=cache_config,
            model_config=model_config,
            parallel_config=None,
            compilation_config=SimpleNamespace(custom_ops=[], mode=None),
        )
        CpuPlatform._align_hybrid_block_size(config_stub, CPUAttentionBackend)
        geometry = Geometry.of(shape, kv_dtype=kv_dtype, tp=tp, alignment=alignment)
        assert geometry.block_tokens == cache_config.block_size
        assert geometry.page_bytes == cache_config.mamba_page_size_padded


@pytest.mark.parametrize(("layout", "mode", "tokens"), [("in-page", "align", 288_446), ("off", "none", 291_369)])
def test_vllm_prints_the_specs_tokens_for_18475_mib(shape_27b, geometry_27b, layout, mode, tokens) -> None:
    cache, printed = vllm_pool(shape_27b, geometry_27b, 18475 << 20, 262144, mode)
    plan = plan_pool(layout, geometry_27b, 18475 << 20, max_model_len=262144, session_tokens=65536)
    assert (plan.num_blocks, plan.printed_tokens) == (cache.num_blocks, printed) == (329, tokens)
    assert [len(group.layer_names) for group in cache.kv_cache_groups] == [16, 16, 16, 16]


@pytest.mark.parametrize(
    ("attention_layers", "gdn_layers"), [(16, 48), (12, 36), (5, 14), (4, 5), (10, 21), (7, 3), (1, 6), (9, 9)]
)
def test_groups_and_pools_are_vllms_for_odd_layer_counts_too(
    config_27b, attention_layers: int, gdn_layers: int
) -> None:
    kinds = ["full_attention"] * attention_layers + ["linear_attention"] * gdn_layers
    config_27b["text_config"].update(layer_types=kinds)
    shape = ModelShape.from_config(config_27b)
    geometry = Geometry.of(shape)
    for memory in (3 << 30, 9_999_999_999):
        cache, printed = vllm_pool(shape, geometry, memory, 8192)
        plan = plan_pool("native", geometry, memory, max_model_len=8192, session_tokens=8192)
        assert (plan.num_blocks, plan.printed_tokens) == (cache.num_blocks, printed)
        widths = [len(group.layer_names) for group in cache.kv_cache_groups]
        assert len(widths) == geometry.attention_groups + geometry.gdn_groups
        assert max(widths) * geometry.page_bytes == geometry.block_bytes
        assert blocks_for("native", geometry, memory) == cache.num_blocks


def test_vllm_starts_at_the_largest_max_model_len_and_refuses_one_token_more(shape_27b, geometry_27b) -> None:
    memory = 176 * geometry_27b.block_bytes  # the pool that per-block leaves
    plan = plan_pool("native", geometry_27b, memory, max_model_len=262144, session_tokens=65536)
    assert plan.printed_tokens is None
    with pytest.raises(ValueError, match=f"estimated maximum model length is {plan.largest_max_model_len}"):
        vllm_pool(shape_27b, geometry_27b, memory, 262144)
    with pytest.raises(ValueError, match="KV cache is needed"):
        vllm_pool(shape_27b, geometry_27b, memory, plan.largest_max_model_len + 1)
    assert vllm_pool(shape_27b, geometry_27b, memory, plan.largest_max_model_len)[1] == 152_289


def turns_that_lost_their_prefix(shape: ModelShape, geometry: Geometry, num_blocks: int, sessions: int) -> int:
    """Take turns of 3,200 tokens, 8K to 64K as in spec.txt, on vLLM's KV manager, every checkpoint hashed."""
    block = geometry.block_tokens
    attention, gdn = vllm_specs(shape, geometry, "align")
    groups = [KVCacheGroupSpec(["attention"], attention)]
    groups += [KVCacheGroupSpec([f"gdn{i}"], gdn) for i in range(geometry.gdn_groups)]
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=None,
    )
    manager = KVCacheManager(cache, 65536, block, block, max_in_flight_tokens=1024)
    hasher = get_request_block_hasher(block, sha256)
    lost, before = 0, 0
    for length in range(65536 - 18 * 3200, 65537, 3200):
        for session in range(sessions):
            tokens = [session * 65536 + i for i in range(length)]
            request = Request(f"{length}/{session}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
            manager.new_step_starts()
            hit_blocks, hit, _ = manager.get_computed_blocks(request)
            lost += hit < before // block * block
            start, first = hit, True
            while start < length:
                # A chunk ends on a boundary, the last one at the end of the prompt.
                end = min(length, (start // block + 1) * block)
                assert manager.allocate_slots(request, end - start, hit if first else 0, hit_blocks if first else None)
                request.num_computed_tokens, start, first = end, end, False
                manager.new_step_starts()
            manager.free(request)
        before = length
    return lost


@pytest.mark.parametrize("num_blocks", [711, 379])
def test_vllms_own_block_pool_keeps_the_sessions_that_the_plan_counts_and_no_more(
    shape_27b, geometry_27b, num_blocks: int
) -> None:
    init_none_hash(sha256)
    kept = sessions_kept(num_blocks, geometry_27b, 65536, "native")
    assert kept == {711: 8, 379: 4}[num_blocks]
    assert turns_that_lost_their_prefix(shape_27b, geometry_27b, num_blocks, kept) == 0
    assert turns_that_lost_their_prefix(shape_27b, geometry_27b, num_blocks, kept + 1) > 0
