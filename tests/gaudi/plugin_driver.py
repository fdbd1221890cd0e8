"""Runs one scenario on the real vllm-gaudi and writes what came out as JSON; the device is emulated.

`python plugin_driver.py SCENARIO MODEL OUT [JSON of options]`: a process of its own, because an engine holds global
state and its environment is read at import. `INPAGE_TEST_BREAK` names a rule to break (a mutant): vLLM's processes
import this file when they are spawned, so the break reaches all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from engine_words import Words, main, same

BLOCK = 384
ENGINE = {
    "max_model_len": 4096,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "seed": 0,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": True,
    "mamba_ssm_cache_dtype": "float32",
    "num_gpu_blocks_override": 64,
}
LENGTHS = (1500, 900, 1160, 2000, 1536, 769)


class Engine(Words):
    """With the options above, unless a scenario says otherwise."""

    options = ENGINE
    seed = 0

    def hit_against_cold(self, lengths: tuple[int, ...] = LENGTHS, unit: int = 0) -> list[dict[str, Any]]:
        """Every prompt and its extension cold; then an unrelated request; then both as hits.

        With `unit` the extension's cold run also ends a chunk on the prompt's last mark, where the hit starts.
        """
        rows = []
        for length in lengths:
            prompt, salt = self.tokens(length), str(self.random.random())
            cold = self.one(prompt, salt=f"{salt} cold")
            extension = prompt + cold["tokens"] + self.tokens(200)
            with self.chunk_ends([length // unit * unit] if unit else []):
                cold_extension = self.one(extension, salt=f"{salt} extension")
            self.one(prompt, salt=salt)
            self.one(self.tokens(800))
            for kind, asked, reference in (("same", prompt, cold), ("extension", extension, cold_extension)):
                hit = self.one(asked, salt=salt)
                rows.append({"length": length, "kind": kind, "cold": reference["cached"], **compare(reference, hit)})
        return rows

    @contextmanager
    def chunk_ends(self, positions: list[int]) -> Iterator[None]:
        """For the time of a `with` block prefill chunks end at these positions too."""
        scheduler = self.core.scheduler if positions else None
        split = getattr(scheduler, "_mamba_block_aligned_split", None)

        def with_ends(request: Any, tokens: int, *found: int, **more: int) -> int:
            start = request.num_computed_tokens + sum(found) + sum(more.values())
            tokens = split(request, tokens, *found, **more)
            return min([tokens, *(position - start for position in positions if position > start)])

        if scheduler is None:
            yield
            return
        scheduler._mamba_block_aligned_split = with_ends
        try:
            yield
        finally:
            scheduler._mamba_block_aligned_split = split

    def with_its_ends(self, prompt: list[int], salt: str) -> tuple[dict[str, Any], list[int]]:
        """An answer, and where the chunks of its prompt ended, its start first."""
        ends: list[int] = []
        schedule = self.core.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            cached = output.scheduled_cached_reqs
            starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for name, start in starts.items():
                if start < len(prompt):
                    ends.extend([start] if not ends else [])
                    ends.append(start + output.num_scheduled_tokens[name])
            return output

        self.core.scheduler.schedule = watched
        try:
            return self.one(prompt, salt=salt), ends
        finally:
            self.core.scheduler.schedule = schedule


def compare(cold: dict[str, Any], hit: dict[str, Any]) -> dict[str, Any]:
    """How a hit differs from cold; `drift` is the largest difference of a logprob of the same token, None for NaN."""
    pairs = [
        abs(a - dict(theirs)[token])
        for mine, theirs in zip(cold["logprobs"], hit["logprobs"], strict=True)
        for token, a in mine
        if token in dict(theirs)
    ]
    drift = max(pairs, default=0.0)
    return {
        "hit": hit["cached"],
        "equal": same(cold, hit),
        "drift": drift if drift == drift and all(p == p for p in pairs) else None,
    }


def parity(model: str, options: dict[str, Any]) -> Any:
    """Hit against cold."""
    lengths, same_chunks = tuple(options.pop("lengths", LENGTHS)), options.pop("same_chunks", False)
    engine = Engine(model, **options)
    if options.get("load_format") == "dummy":
        give_weights(engine.runner.model)
    import inpage

    try:
        unit = options["prefix_match_unit"] if same_chunks else 0
        return {"rows": engine.hit_against_cold(lengths, unit), "inpage": inpage.__file__}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def chunk_ends(model: str, options: dict[str, Any]) -> Any:
    """Each prompt cold, as a hit, cold with the hit's chunk ends, and cold with others; all against the first."""
    engine = Engine(model, **options)
    give_weights(engine.runner.model)
    rows = []
    for index, length in enumerate((*LENGTHS, 2300)):
        prompt, salt = engine.tokens(length), f"{index}"
        cold, cold_ends = engine.with_its_ends(prompt, f"{salt} cold")
        engine.one(prompt + engine.tokens(BLOCK), salt=salt)  # the next turn first, so that junctions come about
        engine.one(engine.tokens(800))
        hit, hit_ends = engine.with_its_ends(prompt, salt)
        with engine.chunk_ends(hit_ends):
            same_ends, ends = engine.with_its_ends(prompt, f"{salt} same ends")
        assert ends[-len(hit_ends) :] == hit_ends
        drifts = [compare(cold, same_ends)["drift"]]
        for other in (128, BLOCK):
            with engine.chunk_ends(list(range(other, length, other))):
                answer, other_ends = engine.with_its_ends(prompt, f"{salt} {other}")
            assert other_ends[1] == min(other, length)
            drifts.append(compare(cold, answer)["drift"])
        row = {"length": length, "cold ends": cold_ends, "hit ends": hit_ends, "cold drift": max(drifts)}
        rows.append(row | {"same ends": same(same_ends, hit), **compare(cold, hit)})
    return rows


def sleeping(model: str, options: dict[str, Any]) -> Any:
    """Hit against cold, sleep and wake, and again; what was cached before is not found afterwards."""
    engine = Engine(model, enable_sleep_mode=True, **options)
    prompt = engine.tokens(900)
    cold = engine.one(prompt)
    rows = engine.hit_against_cold((1500,))
    engine.llm.sleep(1)
    asleep = engine.runner.mover is None
    engine.llm.wake_up()
    return {
        "rows": [*rows, *engine.hit_against_cold((1500,))],
        "asleep": asleep,
        "afterwards": compare(cold, engine.one(prompt)),
    }


def switching(model: str, options: dict[str, Any]) -> Any:
    """Hit against cold on one model, on another after vllm-gaudi's switch, and on the first again."""
    import cloudpickle
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm_gaudi.v1.engine.core_patch import install_engine_core_patch

    install_engine_core_patch()  # as vllm-gaudi's multi-model server does
    other, mended = options.pop("other"), options.pop("mended")
    engine = Engine(model, **options)

    initialize = engine.core._initialize_kv_caches

    def with_block_size(config: Any) -> Any:
        # v0.26.0 chooses the block before the model is loaded, finds no layers, and cannot switch to any hybrid.
        current_platform.update_block_size_for_backend(config)
        return initialize(config)

    if mended:
        engine.core._initialize_kv_caches = with_block_size

    def switch_to(name: str) -> str:
        config = EngineArgs(model=name, **{**ENGINE, **options}).create_engine_config()
        engine.core.gaudi_reconfigure_engine(cloudpickle.dumps(config))
        return type(engine.runner).__name__

    rows = engine.hit_against_cold((900,))
    try:
        runners = [switch_to(other)]
    except NotImplementedError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    rows += engine.hit_against_cold((900,))
    runners.append(switch_to(model))
    return {"rows": rows + engine.hit_against_cold((900,)), "runners": runners}


def give_weights(model: Any) -> None:
    """Weights as the demo's model has them, not vLLM's dummies, which forget a state within a few tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def normal(shape: Any, deviation: float) -> Any:
        return torch.randn(shape, generator=generator) * deviation

    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                weight.copy_(torch.log(torch.rand(weight.shape, generator=generator) * 0.2 + 0.002))
            elif name.endswith("dt_bias"):
                weight.copy_(torch.rand(weight.shape, generator=generator) * 2 - 4)
            elif "conv1d" in name:
                weight.copy_(normal(weight.shape, 0.5))
            elif weight.dim() >= 2:
                gain = 2.0 if "lm_head" in name else 1.0
                weight.copy_(normal(weight.shape, 1.0 if "embed" in name else gain / weight.shape[-1] ** 0.5))
            else:
                weight.copy_(normal(weight.shape, 0.1) + ("linear_attn.norm" in name))


@contextmanager
def mutated(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """One rule broken for the time of a `with` block."""
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        delattr(owner, name)


def mutants(model: str, options: dict[str, Any]) -> Any:
    """Break one rule after the other on a running engine: how many of six hits still equal cold?"""
    engine = Engine(model, **{"num_gpu_blocks_override": 40} | options)
    store = engine.runner.mover.store

    def hits() -> int:
        return sum(row["equal"] for row in engine.hit_against_cold((1500, 900, 2000)))

    def hits_on_nan_pages() -> int:
        """The same, with every free page full of NaN when it is handed out."""
        engine.llm.reset_prefix_cache()
        for pages in store.attention_pages:
            for part in pages:
                part.fill_(-1)
        return hits()

    result = {"unbroken": hits(), "unbroken, pages full of NaN": hits_on_nan_pages()}
    with mutated(store, "save", lambda slot, blocks: 0):
        result["no save"] = hits()
    with mutated(store, "restore", lambda slot, blocks: 0):
        result["no restore"] = hits()
    with mutated(store, "zero_pages", lambda blocks: None):
        result["no zeroing"] = hits_on_nan_pages()
    return result


def break_rule(name: str) -> None:
    """Break a rule in this process, before an engine is made."""
    import dataclasses

    from inpage.engines import gaudi, scheduler

    if name == "no grid fix":
        scheduler.SchedulerSide._split = lambda self, original, *args, **kwargs: original(*args, **kwargs)
    elif name == "no pad fix":
        gaudi.pad_block_id = lambda config, num_blocks, kernel_block_tokens: num_blocks
    elif name == "no hand-back":
        facts = gaudi.step_facts
        gaudi.step_facts = lambda *args: dataclasses.replace(facts(*args), preempted=(), resumed=())
    else:
        raise SystemExit(f"no rule to break is called {name!r}")


def preemption(model: str, options: dict[str, Any]) -> Any:
    """Two requests fill a small pool; a more urgent one takes the place of one of them, which comes back."""
    from vllm import SamplingParams

    options = {
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 13,
        "scheduling_policy": "priority",
        "max_model_len": 1536,
    } | options
    engine = Engine(model, **options)
    scheduler, llm_engine = engine.core.scheduler, engine.llm.llm_engine
    mover = getattr(engine.runner, "mover", None)
    states = StatesSeen(mover.store) if mover is not None else None
    preempted: list[str] = []
    resumed: list[list[Any]] = []
    preempt, schedule = scheduler._preempt_request, scheduler.schedule

    def count_preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id.rsplit("-", 1)[0])
        return preempt(request, *args, **kwargs)

    def count_resumed(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        resumed.extend(
            [name.rsplit("-", 1)[0], cached.num_computed_tokens[index]]
            for index, name in enumerate(cached.req_ids)
            if name in cached.resumed_req_ids
        )
        return output

    scheduler._preempt_request, scheduler.schedule = count_preempted, count_resumed

    def parameters(output: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=output, logprobs=1, ignore_eos=True, detokenize=False)

    prompts = {"a": engine.tokens(1100), "b": engine.tokens(700), "c": engine.tokens(60)}
    finished: dict[str, Any] = {}

    def step() -> None:
        for output in llm_engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)

    try:
        llm_engine.add_request("a", {"prompt_token_ids": prompts["a"]}, parameters(300), priority=5)
        llm_engine.add_request("b", {"prompt_token_ids": prompts["b"]}, parameters(500), priority=6)
        for _ in range(6):
            step()
        llm_engine.add_request("c", {"prompt_token_ids": prompts["c"]}, parameters(20), priority=0)
        steps = 0
        while llm_engine.has_unfinished_requests() and steps < 2000:
            step()
            steps += 1
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "preempted": preempted}
    result = {
        "preempted": preempted,
        "resumed": resumed,
        "finished": {name: len(tokens) for name, tokens in finished.items()},
    }
    if mover is not None and states is not None:
        engine.one(engine.tokens(5), 1)  # its first step hands the others' slots back
        mover.check_integrity()
        result |= {
            "held": len(mover.slots.held),
            "counters": vars(mover.counters),
            "restores": states.restores,
            "restored as saved": states.as_saved,
        }
    return result


class StatesSeen:
    """Watches the copies of a store: is what comes back into a slot what went into the pages, bit for bit?"""

    def __init__(self, store: Any) -> None:
        self.restores = self.as_saved = 0
        self._saved: dict[tuple[int, ...], bytes] = {}
        save, restore = store.save, store.restore

        def state(slot: int) -> bytes:
            return b"".join(part[slot].numpy().tobytes() for layer in store.layers for part in layer.slot_parts)

        def watched_save(slot: int, blocks: Any) -> int:
            self._saved[tuple(blocks)] = state(slot)
            return save(slot, blocks)

        def watched_restore(slot: int, blocks: Any) -> int:
            copied = restore(slot, blocks)
            self.restores += 1
            self.as_saved += self._saved.get(tuple(blocks)) == state(slot)
            return copied

        store.save, store.restore = watched_save, watched_restore


def decode_padding(model: str, options: dict[str, Any]) -> Any:
    """Three decodes padded to four: which bytes of the pool change beside the rows that the step is to write?

    Every row of K and V in every attention layer is compared, whoever it belongs to: attention, a checkpoint, nobody.
    """
    import torch

    engine = Engine(model, **{"enable_prefix_caching": False} | options)
    runner = engine.runner
    groups = runner.kv_cache_config.kv_cache_groups
    attention = next(index for index, group in enumerate(groups) if hasattr(group.kv_cache_spec, "num_kv_heads"))
    context = runner.vllm_config.compilation_config.static_forward_context
    pool_rows = runner.kv_cache_config.num_blocks * BLOCK
    pool = {
        f"{part} of {name}": tensor[:pool_rows].view(torch.int16).flatten(1)  # as it is stored: NaN equals itself
        for name in groups[attention].layer_names
        for part, tensor in zip("KV", context[name].kv_cache[:2], strict=True)
    }
    mover = getattr(runner, "mover", None)
    original = runner.sample_tokens
    strays: dict[str, set[int]] = {name: set() for name in pool}
    result: dict[str, Any] = {"steps": 0, "steps with strays": 0, "saves": 0, "checkpoints": 0, "live": set()}

    def rows_to_write(step: Any) -> set[int]:
        """The row of each token in its own block, and the pages of the checkpoints that fall due."""
        rows = set()
        for request_id, tokens in step.num_scheduled_tokens.items():
            request = runner.requests[request_id]
            end = request.num_computed_tokens + tokens
            for position in range(request.num_computed_tokens, end):
                rows.add(request.block_ids[attention][position // BLOCK] * BLOCK + position % BLOCK)
            if mover is not None and end % BLOCK == 0:
                result["saves"] += 1
                for group, table in enumerate(request.block_ids):
                    if group != attention:
                        first = table[end // BLOCK - 1] * BLOCK
                        rows.update(range(first, first + BLOCK))
        return rows

    def holder(row: int) -> str:
        block = row // BLOCK
        for request in runner.requests.values():
            if block in request.block_ids[attention]:
                return "attention of a running request"
        return str(mover.ledger.content(block)) if mover is not None else "nobody"

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        step = runner.scheduler_output
        if step is None or len(step.num_scheduled_tokens) != 3 or set(step.num_scheduled_tokens.values()) != {1}:
            return original(*args, **kwargs)
        before = {name: tensor.clone() for name, tensor in pool.items()}
        expected = rows_to_write(step)
        output = original(*args, **kwargs)
        found = {
            name: {*(before[name] != tensor).any(1).nonzero().flatten().tolist()} - expected
            for name, tensor in pool.items()
        }
        for name, rows in found.items():
            strays[name] |= rows
            result["live"] |= {holder(row) for row in rows}
        result["steps"] += 1
        result["steps with strays"] += any(found.values())
        if mover is not None:
            result["checkpoints"] = max(result["checkpoints"], mover.ledger.counts()[1])
        return output

    runner.sample_tokens = sample_tokens
    # The second passes a boundary while all three decode: a checkpoint is written in a padded step.
    engine.generate([engine.tokens(n) for n in (1600, 1910, 1800)], 16)
    return result | {
        "pad block": runner._PAD_BLOCK_ID,
        "live": sorted(result["live"]),
        "strays": {name: sorted(rows) for name, rows in strays.items()},
        "bytes compared": sum(tensor.numel() * tensor.element_size() for tensor in pool.values()),
        "runner": type(runner).__name__,
    }


def pool(model: str, options: dict[str, Any]) -> Any:
    """How many blocks the same memory gives, and what vLLM prints."""
    engine = Engine(model, **{"num_gpu_blocks_override": None} | options)
    runner = engine.runner
    config = runner.kv_cache_config
    sizes = {tensor.size for tensor in config.kv_cache_tensors}
    return {"num_blocks": config.num_blocks, "tensor bytes": sorted(sizes), "tensors": len(config.kv_cache_tensors)}


def refusals(model: str, options: dict[str, Any]) -> Any:
    """What becomes of configurations while they are made, no engine starts: the worker's class, or the error.

    `cases` are pairs of engine options and environment.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    results = []
    for engine_options, environment in options["cases"]:
        if connector := engine_options.pop("connector", None):
            engine_options["kv_transfer_config"] = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
        os.environ.update(environment)
        try:
            config = EngineArgs(model=model, **{**ENGINE, **engine_options}).create_engine_config()
            results.append(config.parallel_config.worker_cls)
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        for name in environment:
            del os.environ[name]
    return results


def stops(model: str, options: dict[str, Any]) -> Any:
    """What must not be served, forced on a running engine."""
    fault = options.pop("fault")
    engine = Engine(model, **options)
    prompt = engine.tokens(1500)
    engine.one(prompt)
    original = engine.core.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if fault == "off the grid":
                new.num_computed_tokens -= 17
            index = new.num_computed_tokens // BLOCK - 1
            table = new.block_ids[engine.runner._state_groups[0]]
            if fault == "null block":
                table[index] = 0
            elif fault == "foreign page":
                table[index] = new.block_ids[-1 if engine.runner._state_groups[0] == 0 else 0][0]
        return output

    engine.core.scheduler.schedule = schedule
    try:
        engine.one(prompt)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


SCENARIOS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    f.__name__: f
    for f in (parity, chunk_ends, sleeping, switching, mutants, preemption, decode_padding, pool, refusals, stops)
}


if os.environ.get("INPAGE_TEST_BREAK"):
    break_rule(os.environ["INPAGE_TEST_BREAK"])

if __name__ == "__main__":
    main(SCENARIOS, shut_down=False)
    sys.stdout.flush()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        os._exit(0)  # nothing that an engine of this process left running is waited for
