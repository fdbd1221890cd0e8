"""`vllm.LLM` with short words, for the scenario drivers, and how the tests run a driver."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

Answer = dict[str, Any]


class Words:
    """An engine; a driver's subclass says with which options and which random prompts."""

    started: ClassVar[list[Words]] = []
    options: ClassVar[dict[str, Any]]
    seed: ClassVar[int]

    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, **{**self.options, **options})
        self.random = random.Random(self.seed)
        Words.started.append(self)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(250) for _ in range(count)]

    def generate(self, prompts: list[list[int]], output: int = 8, salt: str | None = None) -> list[Answer]:
        """Token ids, all logprobs and cached tokens of each prompt, run together."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output, logprobs=3, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        return [
            {
                "tokens": list(answer.outputs[0].token_ids),
                "logprobs": [sorted((k, v.logprob) for k, v in d.items()) for d in answer.outputs[0].logprobs],
                "cached": answer.num_cached_tokens,
            }
            for answer in self.llm.generate(inputs, params, use_tqdm=False)
        ]

    def one(self, prompt: list[int], output: int = 8, salt: str | None = None) -> Answer:
        return self.generate([prompt], output, salt)[0]


def same(one: Answer, other: Answer) -> bool:
    """Equal to the bit."""
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def main(scenarios: Mapping[str, Any], shut_down: bool = True) -> None:
    """What a driver does: `DRIVER SCENARIO MODEL OUT [JSON of options]`."""
    scenario, model, out = sys.argv[1:4]
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    Path(out).write_text(json.dumps(scenarios[scenario](model, options)))
    for engine in Words.started if shut_down else ():
        engine.llm.llm_engine.engine_core.shutdown()


def run_driver(
    driver: Path,
    scenario: str,
    model: Path,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    out: Path,
    timeout_s: float,
) -> dict[str, Any]:
    """Run one scenario in a process of its own; its `result` and its `log`, which is also printed when it fails."""
    log_file = out.with_name("log")
    with log_file.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(driver), scenario, str(model), str(out), json.dumps(options)],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            process.wait(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):  # whatever the engine left behind
                os.killpg(process.pid, signal.SIGKILL)
    log = log_file.read_text(errors="replace")
    assert out.exists(), f"{scenario} ended with status {process.returncode}:\n{log[-6000:]}"
    return {"result": json.loads(out.read_text()), "log": log}
