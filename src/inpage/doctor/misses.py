"""Why little or nothing hits on a running server: one finding for each reason that its counters show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inpage.doctor.finding import Finding, advice
from inpage.gates.metrics_text import Metrics

WORTH_A_LINE = 0.05
"""A reason that accounts for a smaller share, of the requests or of the tokens, is left out."""
EVICTED = "inpage_evicted_checkpoint_blocks_total"


@dataclass(frozen=True)
class Counts:
    """What a server has counted that tells why requests started cold."""

    requests: int
    cold: int
    short: int
    evicted_before_hit: int
    evicted_after_hit: int
    attention_only_tokens: int
    queried_tokens: int

    @classmethod
    def of(cls, metrics: Metrics, queried_tokens: float) -> Counts | None:
        """None when the server does not show inpage's counters, or those of a version without them."""
        named = [
            metrics.total("inpage_restores_total"),
            metrics.total("inpage_fresh_slots_total"),
            metrics.total("inpage_short_prompts_total"),
            metrics.total(EVICTED, when="before_hit"),
            metrics.total(EVICTED, when="after_hit"),
            metrics.total("inpage_attention_only_tokens_total"),
        ]
        known = [int(value) for value in named if value is not None]
        if len(known) < len(named):
            return None
        restores, cold, short, before, after, attention_only = known
        # A resume after preemption is a start as well.
        requests = max(restores + cold - int(metrics.total("vllm:num_preemptions_total") or 0), short)
        return cls(requests, cold, short, before, after, attention_only, int(queried_tokens))

    @property
    def long_and_cold(self) -> int:
        """Starts without a checkpoint of prompts that could have hit."""
        return max(0, self.cold - self.short)

    @property
    def evicted(self) -> int:
        """Blocks of checkpoints that are no longer there."""
        return self.evicted_before_hit + self.evicted_after_hit


def reasons(counts: Counts, config: Mapping[str, str], reach: int | None) -> list[Finding]:
    """Why requests missed; `reach` is the longest prompt that cannot hit, in tokens, where it is known."""
    found = [_short(counts, reach), _evicted(counts), _attention_only(counts, config), _nothing_shared(counts)]
    return [one for one in found if one is not None]


def _short(counts: Counts, reach: int | None) -> Finding | None:
    if not counts.short or counts.short < WORTH_A_LINE * counts.requests:
        return None
    length = f"{reach:,} tokens" if reach else "one block (or one --prefix-match-unit)"
    return advice(
        "short prompts",
        f"{counts.short:,} of {counts.requests:,} requests had a prompt of {length} at most, which can never hit",
        "--prefix-match-unit 64 (128 on Gaudi) lets prompts hit inside a block; below that nothing is worth caching",
    )


def _evicted(counts: Counts) -> Finding | None:
    if not counts.evicted_before_hit:
        return None
    return advice(
        "evictions",
        f"{counts.evicted_before_hit:,} blocks of checkpoints were evicted before a prompt came back to them, "
        f"{counts.evicted_after_hit:,} after one had: if these prompts do come back, the pool is too small to hold "
        "them until then",
        "give the pool more memory (--kv-cache-memory-bytes), or send fewer sessions to a replica; inpage plan says "
        "how many stay cached",
    )


def _attention_only(counts: Counts, config: Mapping[str, str]) -> Finding | None:
    tokens, queried = counts.attention_only_tokens, counts.queried_tokens
    if not tokens or tokens < WORTH_A_LINE * queried:
        return None
    text = (
        f"{tokens:,} of {queried:,} prompt tokens had their attention blocks in the cache, but no checkpoint at their "
        "end, and were computed again: "
    )
    kept = config.get("prefix_cache_retention_interval")
    if kept not in (None, "None"):
        return advice(
            "no checkpoint",
            f"{text}retention is sparse ({kept}), a prompt that parts from a cached one misses at first sight",
            "--prefix-cache-retention-interval None",
        )
    return advice(
        "no checkpoint",
        f"{text}a token budget of several blocks leaves a checkpoint only at the end of a chunk"
        + (f", or checkpoints were evicted ({counts.evicted:,} blocks)" if counts.evicted else ""),
        "--max-num-batched-tokens below two blocks; inpage doctor MODEL with the server's flags says how many"
        + ("; give the pool more memory" if counts.evicted else ""),
    )


def _nothing_shared(counts: Counts) -> Finding | None:
    """Said only when nothing else can have taken the checkpoints away."""
    parts = counts.attention_only_tokens
    if counts.evicted or parts >= WORTH_A_LINE * counts.queried_tokens or counts.long_and_cold < 2:
        return None
    but = f" (but for {parts:,} tokens in all)" if parts else ""
    return advice(
        "shared prefix",
        f"{counts.long_and_cold:,} requests with prompts long enough to hit found nothing, and nothing was evicted: "
        f"they share no whole block with an earlier prompt that this server has seen{but}",
        "put what is shared first (system prompt, tools; no date, no id before it), send the same cache_salt, and "
        "route a session to the replica that it was on",
    )
