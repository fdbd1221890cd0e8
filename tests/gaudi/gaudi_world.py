"""vLLM's real scheduler and KV manager, in-page's runner over the double: what a server does, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from scheduler_double import BLOCK, make_scheduler, request
from vllm.v1.outputs import ModelRunnerOutput

from inpage.engines.scheduler import SchedulerSide

KERNEL_BLOCK = 4


class World:
    """A scheduler and a runner.

    `release` is the shape of vllm-gaudi: in "v0.26.0" vLLM's split decides where chunks end, on a configured block
    size that has flipped to the kernel's; in "v0.30.0" vllm-gaudi's own split does.
    """

    def __init__(
        self,
        runner_class: Any,
        model: Any,
        release: str = "v0.26.0",
        num_blocks: int = 40,
        sequences: int = 4,
        policy: str = "fcfs",
        with_scheduler_side: bool = True,
        budget: int = 42,
        unit: int | None = None,
    ) -> None:
        self.unit = unit
        self.scheduler = make_scheduler(model, num_blocks, budget, sequences, policy, unit=unit)
        config = self.scheduler.vllm_config
        config.compilation_config.static_forward_context.clear()
        self.runner = runner_class(config)
        self.runner.initialize_kv_cache(self.scheduler.kv_cache_config)
        if release == "v0.30.0":
            from vllm_gaudi.v1.core.sched.hpu_async_scheduler import HPUAsyncScheduler

            self.scheduler.__class__ = HPUAsyncScheduler
        if with_scheduler_side:
            SchedulerSide(self.scheduler)
        if release == "v0.26.0":
            self.scheduler.cache_config.block_size = KERNEL_BLOCK
        self.starts: dict[str, int] = {}
        self.resumes: list[tuple[str, int]] = []
        self.preempted = 0

    @property
    def attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V."""
        context = self.runner.vllm_config.compilation_config.static_forward_context
        return context[self.runner._attention].kv_cache[:2]

    def add(self, name: str, tokens: list[int], output: int = 4, **options: Any) -> None:
        self.scheduler.add_request(request(name, tokens, output, unit=self.unit, **options))

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        self.starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        self.resumes += [
            (name, cached.num_computed_tokens[index])
            for index, name in enumerate(cached.req_ids)
            if name in cached.resumed_req_ids
        ]
        if self.runner.execute_model(output) is not None:
            return output
        answers = self.runner.sample_tokens(None)
        names = list(output.num_scheduled_tokens)
        sampled = [
            [self.runner.token_of(answers[n])]
            if self.scheduler.requests[n].num_computed_tokens >= self.scheduler.requests[n].num_tokens
            else []
            for n in names
        ]
        indices = {name: index for index, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, indices, sampled, None, {}, []))
        return output

    def finish(self, steps: int = 600) -> None:
        """Step until nothing is left, then once more so that the last slots come back."""
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                self.step()
                return
            self.step()
        raise AssertionError(f"requests are left after {steps} steps: {list(self.scheduler.requests)}")

    def ask(self, name: str, tokens: list[int], output: int = 4) -> list[float]:
        """Serve one request alone; its answers."""
        self.add(name, tokens, output)
        self.finish()
        return self.runner.answers[name]


def new_data(name: str, tokens: int, computed: int, tables: list[list[int]]) -> Any:
    """A new request of a step that no scheduler made."""
    return SimpleNamespace(
        req_id=name, prompt_token_ids=list(range(tokens)), num_computed_tokens=computed, block_ids=tables
    )


def step_output(new: list[Any], scheduled: dict[str, int], zero: list[int] | None = None) -> Any:
    """A scheduler output that no scheduler made."""
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=set(),
        preempted_req_ids=set(),
        new_block_ids_to_zero=zero,
    )


__all__ = ["BLOCK", "KERNEL_BLOCK", "World", "new_data", "step_output"]
