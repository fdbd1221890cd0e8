"""The server under test: what it says of itself, and generation with a cached-token count that can be trusted.

Everything comes over HTTP. Two things need care:

- **The block.** The `block_size` in `/metrics` is what one process was configured with, which need not be the
  pool's (on CPU and Gaudi it is reset after start). So the block is probed: the shortest prompt of 2^k + 1 tokens
  that hits when it is sent again hits exactly one block. With hits inside a block (`--prefix-match-unit`) it would hit
  its last mark; so a prompt that is longer by one unit is sent first, whose last mark lies beyond.
- **Cached tokens.** `usage.prompt_tokens_details` where the server sends it (`--enable-prompt-tokens-details`);
  otherwise the growth of `vllm:prefix_cache_hits_total`, which is right as long as nobody else uses the server.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import httpx

from inpage.errors import ConfigError, ServerError
from inpage.gates.client import Completions, Generation
from inpage.gates.metrics_text import Metrics

FIRST_PROBE, LAST_PROBE = 16, 8192
"""Prompts of 17 to 8,193 tokens are probed; the largest published block is 1,792 tokens."""
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def fresh_salt() -> str:
    """A cache salt that nobody has used: the request is cold."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class About:
    """What is known of the server. None means that it does not say."""

    url: str
    model: str
    version: str | None
    max_model_len: int | None
    pool_blocks: int | None
    cache_config: Mapping[str, str]
    match_unit: int | None = None
    block_tokens: int | None = None
    block_source: str = "unknown"
    cached_counts_from: str = "none"
    notes: tuple[str, ...] = ()


class Server:
    """One model of one server."""

    def __init__(self, completions: Completions, about: About) -> None:
        self.completions = completions
        self.about = about

    # ------------------------------------------------------------------ getting to know it
    @classmethod
    def connect(cls, url: str, model: str | None, timeout_s: float, api_key: str | None = None) -> Server:
        """Ask the server who it is; `ConfigError` for a model it does not serve, `ServerError` when it is not there."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not an address: write it like http://127.0.0.1:8000")
        client = Completions(url, model or "", 8, timeout_s, headers)
        try:
            listed = client.http.get("/v1/models")
            listed.raise_for_status()
            models = {entry["id"]: entry for entry in listed.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{url} does not list its models at /v1/models: {error}") from error
        if model is not None and model not in models:
            raise ConfigError(f"--model {model} is not served at {url}; it serves {', '.join(models) or 'nothing'}")
        if not models:
            raise ServerError(f"{url} serves no model")
        client.model = model or next(iter(models))
        server = cls(client, About(url, client.model, None, models[client.model].get("max_model_len"), None, {}))
        config = dict(server.metrics().labels("vllm:cache_config_info"))
        pool, unit = config.get("num_gpu_blocks", ""), config.get("prefix_match_unit", "")
        server.about = replace(
            server.about,
            version=server._version(),
            cache_config=config,
            pool_blocks=int(pool) if pool.isdigit() else None,
            match_unit=int(unit) if unit.isdigit() else None,
            notes=server._notes(config),
        )
        return server

    def _version(self) -> str | None:
        try:
            response = self.completions.http.get("/version")
            version: str | None = response.json().get("version") if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return version

    def _notes(self, config: Mapping[str, str]) -> tuple[str, ...]:
        notes = []
        if busy := self.in_flight():
            notes.append(
                f"{busy} other requests are on this server: equality to the bit wants it quiet, because kernels "
                "may round differently in other batches"
            )
        if config.get("enable_prefix_caching") == "False":
            notes.append("the server says that prefix caching is off: start it with --enable-prefix-caching")
        if config.get("prefix_cache_retention_interval") not in (None, "None"):
            notes.append(
                "the server keeps checkpoints sparsely (--prefix-cache-retention-interval "
                f"{config['prefix_cache_retention_interval']}): prefixes that diverge miss at first sight; None keeps "
                "a checkpoint at every boundary"
            )
        return tuple(notes)

    def learn_block(self, given: int | None, vocab: int, seed: int) -> None:
        """Take the block as given, or probe it; a server without hits keeps `block_tokens` None.

        Raises `ServerError` when the server answers no prompt at all, or without logprobs.
        """
        rng = Random(f"{seed}/block")
        self.completions.generate([rng.randrange(vocab) for _ in range(5)], fresh_salt(), 2)
        if given is not None:
            self.about = replace(self.about, block_tokens=given, block_source="given")
        longest = min(LAST_PROBE, (self.about.max_model_len or LAST_PROBE) - 4)
        unit = self.about.match_unit or 0
        length = max(FIRST_PROBE, unit) if given is None else given
        while length + unit < longest:
            first, salt = [rng.randrange(vocab) for _ in range(length + 1 + unit)], fresh_salt()
            prompt = first[: length + 1]
            self.completions.generate(first, salt, 2)
            before = self.metrics()
            counted = self.completions.generate(prompt, salt, 2).cached_tokens
            grown = self.grown(before, len(prompt))
            if counted or grown:
                source = "usage" if counted else "metrics"
                block = given or counted or grown
                self.about = replace(
                    self.about,
                    cached_counts_from=source,
                    block_tokens=block,
                    block_source="given" if given else f"probed: {block} of a prompt of {len(prompt)} tokens hit",
                )
                return
            length *= 2

    # ------------------------------------------------------------------ metrics
    def metrics(self) -> Metrics:
        """One reading; empty when the server has no `/metrics`."""
        try:
            response = self.completions.http.get("/metrics", timeout=30.0)
        except httpx.HTTPError:
            return Metrics("")
        return Metrics(response.text if response.status_code == 200 else "")

    def trouble(self) -> str | None:
        """Why the server does not answer a short prompt, None when it does."""
        try:
            self.completions.generate([1, 2, 3], fresh_salt(), 1)
        except ServerError as error:
            return str(error)
        return None

    def in_flight(self) -> int:
        """Requests that run or wait, 0 when the server does not say."""
        metrics = self.metrics()
        return int(sum(metrics.total(f"vllm:num_requests_{kind}") or 0 for kind in ("running", "waiting")))

    def drained(self, timeout_s: float = 60.0, nudge: bool = False) -> bool:
        """Wait until nothing runs or waits; False when something still does after `timeout_s`.

        `nudge` sends a short prompt before each look: an engine that has nothing to do does not refresh its gauges.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if nudge:
                self.completions.generate([1, 2, 3], fresh_salt(), 2)
            if not self.in_flight():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def grown(self, before: Metrics, prompt_tokens: int) -> int | None:
        """Growth of the hit counter by a request that has just been answered; None without such a counter."""
        queries, hits = before.total(QUERIES), before.total(HITS)
        if queries is None or hits is None:
            return None
        for _ in range(20):
            after = self.metrics()
            if (after.total(QUERIES) or 0.0) >= queries + prompt_tokens:
                return round((after.total(HITS) or 0.0) - hits)
            time.sleep(0.05)  # counters follow the answer
        return None

    # ------------------------------------------------------------------ generation
    def generate(self, prompt: Sequence[int], salt: str, output_tokens: int | None = None) -> Generation:
        """One request with nothing beside it, and how much of its prompt was cached."""
        if self.about.cached_counts_from != "metrics":
            answer = self.completions.generate(prompt, salt, output_tokens)
            # vLLM leaves a count of zero out of its usage.
            counts = self.about.cached_counts_from == "usage"
            return replace(answer, cached_tokens=answer.cached_tokens or (0 if counts else None))
        before = self.metrics()
        answer = self.completions.generate(prompt, salt, output_tokens)
        return replace(answer, cached_tokens=self.grown(before, len(prompt)))
