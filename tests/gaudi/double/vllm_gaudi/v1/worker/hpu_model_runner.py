"""The runner, around a toy model whose answers depend on every byte that in-page must keep right.

- A GDN layer folds tokens into a number: `s = (31 s + token + group) mod 8191`, kept in the ssm matrix; the conv
  window holds the last token. Both are read from and written to the rows that `prepare_mamba_state_idxs` names.
- An attention layer writes the token into its K and V rows and reads the kernel blocks of its context whole. What is
  beyond the context is masked as on the device, by adding: a NaN there is not hidden.
- Decodes run as one batch, padded to a power of two with the pad ids.

The answer to a request is the sum of all that. Kernel blocks are 4 tokens.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

logger = logging.getLogger("vllm")

KERNEL_BLOCK = 4
MODULUS = 8191
PAD_TOKEN = 999.0


class HPUModelRunner:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.max_model_len = 1024
        self.num_mamba_like_layers = 3
        self.attn_block_size = KERNEL_BLOCK
        self.use_prefix_caching = self.cache_config.enable_prefix_caching
        self.requests: dict[str, Any] = {}
        self.answers: dict[str, list[float]] = {}
        self.scheduler_output: Any = None
        self.warmup_mode = False
        self._PAD_BLOCK_ID = self._PAD_SLOT_ID = -1
        self._gdn_max_reqs = vllm_config.scheduler_config.max_num_seqs
        self._compact_gdn_group_ids: set[int] = set()
        self._compact_gdn_group_offset: dict[int, int] = {}
        self._num_gdn_groups = 0
        self._gdn_slot_free_list: list[int] = []
        self._gdn_req_to_base_slot: dict[str, int] = {}
        if self.use_prefix_caching:
            logger.warning("Compact GDN mode does not support prefix caching.")

    # ------------------------------------------------------------------ the pool
    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config
        groups, num_blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
        context = self.vllm_config.compilation_config.static_forward_context
        gdn = [i for i, g in enumerate(groups) if not isinstance(g.kv_cache_spec, FullAttentionSpec)]
        self._compact_gdn_group_ids = set(gdn)
        self._compact_gdn_group_offset = {group: offset for offset, group in enumerate(gdn)}
        self._num_gdn_groups = len(gdn)
        states: dict[int, tuple[torch.Tensor, ...]] = {}
        for index, group in enumerate(groups):
            spec = group.kv_cache_spec
            for position, name in enumerate(group.layer_names):
                if index in self._compact_gdn_group_ids:
                    # Layers at the same position of their groups share tensors.
                    rows = self._gdn_max_reqs * len(gdn) + 2
                    states.setdefault(
                        position,
                        tuple(torch.zeros(rows, *s, dtype=d) for s, d in zip(spec.shapes, spec.dtypes, strict=True)),
                    )
                    cache: tuple[Any, ...] = states[position]
                else:
                    self._attention, self._attention_group = name, index
                    kernel_blocks = num_blocks * (spec.block_size // KERNEL_BLOCK) + 1
                    shape = (kernel_blocks * KERNEL_BLOCK, spec.num_kv_heads, spec.head_size)
                    cache = (torch.zeros(shape, dtype=spec.dtype), torch.zeros(shape, dtype=spec.dtype), None, None)
                context[name] = SimpleNamespace(kv_cache=cache)
        self._PAD_BLOCK_ID = num_blocks
        self._PAD_SLOT_ID = num_blocks * self.attn_block_size
        self._gdn_slot_free_list = list(range(self._gdn_max_reqs - 1, -1, -1))
        self._gdn_req_to_base_slot.clear()

    # ------------------------------------------------------------------ a step
    def execute_model(self, scheduler_output: Any, warmup_mode: bool = False) -> Any:
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return "nothing to do"
        self.scheduler_output, self.warmup_mode = scheduler_output, warmup_mode
        return None

    def _update_states(self, scheduler_output: Any) -> bool:
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)
        for name in sorted(scheduler_output.finished_req_ids):
            slot = self._gdn_req_to_base_slot.pop(name, None)
            if slot is not None:
                self._gdn_slot_free_list.append(slot)
            else:
                logger.warning("GDN_COMPACT free finished req=%s has NO slot! Possible leak.", name)
        added = []
        for new in scheduler_output.scheduled_new_reqs:
            tables = [list(table) for table in new.block_ids]
            self.requests[new.req_id] = SimpleNamespace(
                tokens=list(new.prompt_token_ids),
                num_prompt_tokens=len(new.prompt_token_ids),
                block_ids=tables,
                num_computed_tokens=new.num_computed_tokens,
            )
            added.append(new.req_id)
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            request = self.requests[name]
            request.num_computed_tokens = cached.num_computed_tokens[index]
            new_blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                request.block_ids = [list(table) for table in new_blocks]
                added.append(name)
            elif new_blocks is not None:
                for table, blocks in zip(request.block_ids, new_blocks, strict=True):
                    table.extend(blocks)
        for name in added:
            if name not in self._gdn_req_to_base_slot:
                self._gdn_req_to_base_slot[name] = self._gdn_slot_free_list.pop()
        return bool(added)

    def prepare_mamba_state_idxs(self, req_indices: list[str], target_bs: int) -> list[list[int]]:
        """Rows of each GDN group, padded with -1; a request's index in the batch is its name here."""
        indices = []
        for group in sorted(self._compact_gdn_group_ids):
            offset = self._compact_gdn_group_offset[group]
            rows = [self._gdn_req_to_base_slot[name] * self._num_gdn_groups + offset + 1 for name in req_indices]
            indices.append(rows + [-1] * (target_bs - len(rows)))
        return indices

    def sample_tokens(self, grammar_output: Any) -> Any:
        output, self.scheduler_output = self.scheduler_output, None
        if output is None:
            return None
        scheduled = output.num_scheduled_tokens
        decodes = [n for n, tokens in scheduled.items() if tokens == 1 and self.requests[n].num_computed_tokens > 0]
        answers: dict[str, float] = {}
        if decodes:
            rows, pad_slots = self._create_decode_input_data(decodes)
            for pad, slot in enumerate(pad_slots, start=len(decodes)):
                self._write_attention(slot, PAD_TOKEN)
                self._fold([group_rows[pad] for group_rows in rows], [0], fresh=False)
            for index, name in enumerate(decodes):
                answers[name] = self._forward(name, 1, [group_rows[index] for group_rows in rows])
        for name, tokens in scheduled.items():
            if name not in answers:
                if self.use_prefix_caching:
                    assert self.requests[name].num_computed_tokens % KERNEL_BLOCK == 0, "the Mamba2 prefill branch"
                rows = self.prepare_mamba_state_idxs([name], 1)
                answers[name] = self._forward(name, tokens, [group_rows[0] for group_rows in rows])
        for name, value in answers.items():
            request = self.requests[name]
            if request.num_computed_tokens + scheduled[name] >= len(request.tokens):
                request.tokens.append(self.token_of(value))
                self.answers.setdefault(name, []).append(value)
        return answers

    def _create_decode_input_data(self, names: list[str]) -> tuple[list[list[int]], list[int]]:
        """State rows of the padded batch, and the attention slots its padding writes to."""
        padded = 1 << (len(names) - 1).bit_length()
        pad_blocks = self.get_habana_paged_attn_buffers(padded - len(names))
        return self.prepare_mamba_state_idxs(names, padded), [block * self.attn_block_size for block in pad_blocks]

    def get_habana_paged_attn_buffers(self, pads: int) -> list[int]:
        """The kernel blocks of padding."""
        return [self._PAD_BLOCK_ID] * pads

    @staticmethod
    def token_of(value: float) -> int:
        return 0 if value != value else int(value) % 200

    # ------------------------------------------------------------------ the toy model
    def _forward(self, name: str, count: int, rows: list[int]) -> float:
        request = self.requests[name]
        begin = request.num_computed_tokens
        tokens = request.tokens[begin : begin + count]
        value = self._fold(rows, tokens, fresh=begin == 0 and count > 1)
        block_tokens = self.kv_cache_config.kv_cache_groups[self._attention_group].kv_cache_spec.block_size
        table = request.block_ids[self._attention_group]
        for position, token in enumerate(tokens, start=begin):
            self._write_attention(table[position // block_tokens] * block_tokens + position % block_tokens, token)
        end = begin + count
        context = -(-end // KERNEL_BLOCK) * KERNEL_BLOCK
        for cache in self.vllm_config.compilation_config.static_forward_context[self._attention].kv_cache[:2]:
            slots = [table[p // block_tokens] * block_tokens + p % block_tokens for p in range(context)]
            seen = cache[slots, 0, 0].float()
            mask = torch.arange(context) < end
            value += float((seen * mask).sum())  # NaN times zero is NaN
        return value

    def _fold(self, rows: list[int], tokens: list[int], fresh: bool) -> float:
        value = 0.0
        for group, row in zip(sorted(self._compact_gdn_group_ids), rows, strict=True):
            name = self.kv_cache_config.kv_cache_groups[group].layer_names[0]
            conv, ssm = self.vllm_config.compilation_config.static_forward_context[name].kv_cache
            state = 0.0 if fresh else float(ssm[row].flatten()[-1])
            for token in tokens:
                state = (31 * state + token + group) % MODULUS
            ssm[row] = state
            conv[row] = tokens[-1]
            value += state + float(conv[row].flatten()[0])
        return value

    def _write_attention(self, slot: int, token: float) -> None:
        for cache in self.vllm_config.compilation_config.static_forward_context[self._attention].kv_cache[:2]:
            cache[slot] = token
