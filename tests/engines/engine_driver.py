"""Runs one scenario on a real vLLM engine and writes what came out as JSON.

`python engine_driver.py SCENARIO MODEL OUT [JSON of engine arguments]`: a process of its own, because an engine
holds global state and its environment is read at import. The tests compare the files, byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from engine_words import Words, main, same

BLOCK = 256
LENGTHS = (1, 2, 200, BLOCK, BLOCK + 1, 1500, 2000)
ENGINE = {
    "max_model_len": 4096,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "seed": 0,
    "max_num_seqs": 4,
    "max_num_batched_tokens": BLOCK + 128,
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "mamba_ssm_cache_dtype": "float32",
    "prefix_cache_retention_interval": None,
    "num_gpu_blocks_override": 60,
}


class Engine(Words):
    """With the options above, unless a scenario says otherwise."""

    options = ENGINE
    seed = 7

    def hit_against_cold(self, lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
        """Each prompt cold, then an unrelated one, then again under the same salt."""
        rows = []
        for length in lengths:
            prompt, salt = self.tokens(length), f"{length}-{self.random.random()}"
            cold = self.one(prompt, salt=salt)
            self.one(self.tokens(500))
            hit = self.one(prompt, salt=salt)
            row = {"length": length, "cold": cold["cached"], "hit": hit["cached"], "equal": same(cold, hit)}
            rows.append(row)
        return rows

    def asked(self, prompt: list[int], salt: str, ends: Sequence[int] = (), beside: bool = False) -> dict[str, Any]:
        """An answer and where its chunks ended, its start first; they end at `ends` too.

        `beside`: another request decodes from before it comes until after it is answered.
        """
        from vllm import SamplingParams

        scheduler, seen = self.core.scheduler, []
        schedule, split = scheduler.schedule, scheduler._mamba_block_aligned_split
        engine, done = self.llm.llm_engine, {}
        name = f"asked {salt} {self.random.random()}"

        def mine(request_id: str) -> bool:
            return request_id.startswith(name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            cached = output.scheduled_cached_reqs
            starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id, start in starts.items():
                if mine(request_id) and start < len(prompt):
                    seen.extend([] if seen else [start])
                    seen.append(start + output.num_scheduled_tokens[request_id])
            return output

        def with_ends(request: Any, tokens: int, *found: int, **more: int) -> int:
            tokens = split(request, tokens, *found, **more)
            start = request.num_computed_tokens + sum(found) + sum(more.values())
            if not mine(request.request_id):
                return tokens
            return min([tokens, *(end - start for end in ends if end > start)])

        def add(request_id: str, tokens: list[int], output: int, salt: str) -> None:
            params = SamplingParams(temperature=0, max_tokens=output, logprobs=3, ignore_eos=True, detokenize=False)
            engine.add_request(request_id, {"prompt_token_ids": tokens, "cache_salt": salt}, params)

        def step() -> None:
            done.update((one.request_id, one) for one in engine.step() if one.finished)

        scheduler.schedule, scheduler._mamba_block_aligned_split = watched, with_ends
        try:
            if beside:
                add("beside", self.tokens(20), 60, f"beside {salt}")
                for _ in range(3):
                    step()
            add(name, prompt, 8, salt)
            while name not in done:
                step()
            assert not (beside and "beside" in done), "the request beside ended too early"
            while engine.has_unfinished_requests():
                step()
        finally:
            scheduler.schedule, scheduler._mamba_block_aligned_split = schedule, split
        answer = done[name].outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "logprobs": [sorted((k, v.logprob) for k, v in d.items()) for d in answer.logprobs],
            "cached": done[name].num_cached_tokens,
            "ends": seen,
        }

    def preemptions(self) -> list[int]:
        """Count preemptions from now on; the list's only entry is the count."""
        scheduler, count = self.core.scheduler, [0]
        original = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return original(*args, **kwargs)

        scheduler._preempt_request = counted
        return count


def parity(model: str, arguments: dict[str, Any]) -> Any:
    """Hit against cold."""
    if arguments.pop("force_async", False):
        force_async_scheduling()
    if arguments.pop("flip_grid", False):
        return flipped_grid(model, arguments)
    lengths = arguments.pop("lengths", LENGTHS)
    engine = Engine(model, **arguments)
    return {"rows": engine.hit_against_cold(lengths)}


def budgets(model: str, arguments: dict[str, Any]) -> Any:
    """Hits against cold runs whose chunks end where the hit's do, and against cold runs with other ends.

    Each alone, then beside a request that decodes. `budget` is in blocks; room for the decodes is added.
    """
    blocks = arguments.pop("budget")
    engine = Engine(model, **{**arguments, "max_num_batched_tokens": blocks * BLOCK + 4})
    rows = []
    for length in (3 * BLOCK + 100, 4 * BLOCK):
        prompt, salt = engine.tokens(length), f"{blocks} {length}"
        cold = engine.asked(prompt, f"{salt} cold")
        engine.asked(prompt + engine.tokens(BLOCK), salt)  # the next turn first, so that junctions come about
        engine.one(engine.tokens(500))
        hit = engine.asked(prompt, salt)
        beside = engine.asked(prompt, salt, beside=True)
        row: dict[str, Any] = {"length": length, "ends": cold["ends"]}
        row["cold drift"] = max(
            drift(cold, engine.asked(prompt, f"{salt} {step}", range(step, length, step)))
            for step in (BLOCK, 2 * BLOCK)
        )
        row["cold drift beside"] = drift(cold, engine.asked(prompt, f"{salt} cold beside", beside=True))
        for name, answer in (("hit", hit), ("beside", beside)):
            company = name == "beside"
            same_ends = engine.asked(prompt, f"{salt} same ends as {name}", answer["ends"], beside=company)
            row[name] = {
                "cached": answer["cached"],
                "ends": answer["ends"],
                "cold ends": same_ends["ends"],
                "same ends": same(answer, same_ends),
                "equal": same(answer, cold),
                "drift": drift(cold, answer),
            }
        rows.append(row)
    return rows


def drift(cold: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a logprob before the tokens part."""
    worst = 0.0
    for index, (mine, theirs) in enumerate(zip(cold["logprobs"], other["logprobs"], strict=True)):
        known = dict(theirs)
        worst = max([worst, *(abs(value - known[token]) for token, value in mine if token in known)])
        if cold["tokens"][index] != other["tokens"][index]:
            break
    return worst


def force_async_scheduling() -> None:
    """vLLM's CPU platform turns async scheduling off; turn it on again, for this process's front end."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


def flipped_grid(model: str, arguments: dict[str, Any]) -> Any:
    """What happens to a server's EngineCore, forced in this process: the configured block becomes 128."""
    without_fix = arguments.pop("without_fix", False)
    engine = Engine(model, **arguments)
    scheduler = engine.core.scheduler
    scheduler.cache_config.block_size = 128
    if without_fix:
        scheduler._mamba_block_aligned_split = scheduler._mamba_block_aligned_split.args[0]
    try:
        return {"rows": engine.hit_against_cold((1500,))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def crowded(model: str, arguments: dict[str, Any]) -> Any:
    """More sessions than the pool holds: preemptions, resumes, diverging prefixes, growing conversations."""
    arguments = {"num_gpu_blocks_override": 24, "max_num_seqs": 6, **arguments}
    engine = Engine(model, **arguments)
    count = engine.preemptions()
    answers: list[Any] = []
    base, last = engine.tokens(900), None

    def almost_whole(start: list[int], least: int, most: int) -> list[int]:
        """`start` and tokens up to 1 to 30 before the end of a block: its answer soon needs another and preempts."""
        length = len(start) + engine.random.randrange(least, most)
        return start + engine.tokens(length + -length % BLOCK - engine.random.randrange(1, 31) - len(start))

    for _ in range(7):
        prompts = [almost_whole(base, 200, 1100) for _ in range(3)]
        prompts += [engine.tokens(1), almost_whole([], 2, 1500), engine.tokens(2 + engine.random.randrange(1500))]
        if last:
            prompts.append(last + engine.tokens(300))
        answers += [{"prompt": p, **a} for p, a in zip(prompts, engine.generate(prompts, 40), strict=True)]
        last = prompts[0] + answers[-len(prompts)]["tokens"]
    preemptions = count[0]
    cold = {}
    for one in (a["prompt"] for a in answers if len(a["prompt"]) == 1):
        beside = engine.tokens(300)
        runs = [[one], [one, beside], [beside, one]]
        cold[one[0]] = [engine.generate(prompts, 1)[prompts.index(one)] for prompts in runs]
    result = {"preemptions": preemptions, "answers": answers, "cold": cold, "runner": type(engine.runner).__name__}
    mover = getattr(engine.runner, "mover", None)
    if mover is not None:
        engine.one(engine.tokens(5), 1)  # its step hands the others' last slots back
        mover.check_integrity()
        result |= {"held": len(mover.slots.held), "counters": vars(mover.counters)}
    return result


def inside(model: str, arguments: dict[str, Any]) -> Any:
    """Hits inside a block: prompts around marks, sent again, extended, and parted from. Each against its cold run."""
    engine = Engine(model, **{"prefix_match_unit": 64, **arguments})
    rows = []

    def compare(kind: str, first: list[int], then: list[int]) -> None:
        salt = f"{kind} {engine.random.random()}"
        cold = engine.one(then, salt=f"cold {salt}")
        engine.one(first, salt=salt)
        engine.one(engine.tokens(500))
        hit = engine.one(then, salt=salt)
        row = {"kind": kind, "first": len(first), "then": len(then)}
        rows.append(row | {"cold": cold["cached"], "hit": hit["cached"], "equal": same(cold, hit)})

    for length in (63, 64, 65, 128, 200, BLOCK - 1, BLOCK + 63, BLOCK + 65, 1000):
        prompt = engine.tokens(length)
        compare("again", prompt, prompt)
    for length, more in ((65, 30), (200, 100), (200, 900), (1000, 30), (1000, 700)):
        prompt = engine.tokens(length)
        compare("extended", prompt, prompt + engine.tokens(more))
    for length, shared in ((200, 100), (1000, 950), (1000, 970), (700, 650)):
        prompt = engine.tokens(length)
        compare("parted", prompt, prompt[:shared] + engine.tokens(200))
    talk, salt = engine.tokens(150), "talk"
    for _ in range(6):
        cold, hit = engine.one(talk, 20, salt=f"cold {len(talk)}"), engine.one(talk, 20, salt=salt)
        row = {"kind": "talk", "then": len(talk), "cold": cold["cached"], "hit": hit["cached"]}
        rows.append(row | {"equal": same(cold, hit)})
        talk = talk + hit["tokens"] + engine.tokens(90)
    result: dict[str, Any] = {"rows": rows}
    mover = getattr(engine.runner, "mover", None)
    if mover is not None:
        result["counters"] = vars(mover.counters)
        with mutated(mover.store, "copy_pages", lambda copies: 0):
            prompt = engine.tokens(200)
            cold = engine.one(prompt)
            result["no copy"] = cold["logprobs"] == engine.one(prompt)["logprobs"]
    return result


def refused_pool(model: str, arguments: dict[str, Any]) -> Any:
    """An engine whose start is refused; the log says why."""
    try:
        Engine(model, **arguments)
        return "started"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def mutated(owner: Any, name: str, replacement: Any) -> Any:
    """One rule broken for the time of a `with` block."""
    original = owner.__dict__[name] if name in vars(owner) else None
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def mutants(model: str, arguments: dict[str, Any]) -> Any:
    """Break one rule after the other on a running engine; the last one ends it."""
    engine = Engine(model, **{"num_gpu_blocks_override": 40, **arguments})
    mover = engine.runner.mover
    store = mover.store

    def hits() -> int:
        return sum(row["equal"] for row in engine.hit_against_cold((1500, 2000, 800)))

    def nan_pages() -> int:
        """Prompts whose answers stay finite though every free page holds NaN when it is handed out."""
        finite = 0
        for length in (1500, 700, 1300):
            engine.llm.reset_prefix_cache()
            for pages in store.attention_pages:
                for part in pages:
                    part.fill_(-1)
            answer = engine.one(engine.tokens(length))
            finite += all(value == value for top in answer["logprobs"] for _, value in top)
        return finite

    result: dict[str, Any] = {"unbroken": hits(), "unbroken on NaN pages": nan_pages()}
    with mutated(store, "save", lambda slot, blocks: 0):
        result["no save"] = hits()
    with mutated(store, "restore", lambda slot, blocks: 0):
        result["no restore"] = hits()
    with mutated(store, "zero_pages", lambda blocks: None):
        result["no zeroing"] = nan_pages()
    with mutated(store, "zero_slot", lambda slot: None):
        ones = []
        for _ in range(4):
            ones.append(engine.one([5], salt="one"))
            engine.one(engine.tokens(600))
        result["distinct answers to one token, no zeroed slot"] = len({json.dumps(a["logprobs"]) for a in ones})
    ones = []
    for _ in range(4):
        ones.append(engine.one([5], salt="one"))
        engine.one(engine.tokens(600))
    result["distinct answers to one token"] = len({json.dumps(a["logprobs"]) for a in ones})
    try:
        with mutated(mover.slots, "hand_back", lambda requests: []):
            hits()
        result["no hand-back"] = "nothing happened"
    except Exception as error:
        result["no hand-back"] = f"{type(error).__name__}: {error}"
    return result


def untouched(model: str, arguments: dict[str, Any]) -> Any:
    """What vLLM is made of, and what it answers."""
    engine = Engine(model, **arguments)
    scheduler = engine.core.scheduler
    return {
        "rows": [engine.one(engine.tokens(length), 12) for length in (1, 40, 700, 1500, 700)],
        "runner": type(engine.runner).__module__,
        "worker": type(engine.core.model_executor.driver_worker.worker).__module__,
        "scheduler": [name for name in ("schedule", "inpage") if name in vars(scheduler)],
        "inpage modules": sorted(name for name in sys.modules if name.startswith("inpage.engines")),
    }


def refusals(model: str, arguments: dict[str, Any]) -> Any:
    """Configurations that are not covered, refused while the configuration is made: no engine starts."""
    from vllm.engine.arg_utils import EngineArgs

    results: dict[str, str] = {}
    for name, extra in arguments.items():
        options = {**ENGINE, **extra}
        try:
            EngineArgs(model=model, **options).create_engine_config()
            results[name] = "accepted"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


SCENARIOS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    f.__name__: f for f in (parity, budgets, crowded, inside, mutants, untouched, refusals, refused_pool)
}


if __name__ == "__main__":
    main(SCENARIOS)
