"""A running server: what `/v1/models`, `/version` and `/metrics` say. No prompt is sent."""

from __future__ import annotations

from collections.abc import Mapping

from inpage.doctor.finding import Finding, advice, info, ok, wrong
from inpage.doctor.misses import Counts, reasons
from inpage.gates.metrics_text import Metrics
from inpage.gates.server import HITS, QUERIES, About, Server
from inpage.layout.geometry import Geometry

OURS = "inpage"
FEW_HITS = 0.05
ENOUGH_TOKENS = 10_000


def examine(server: Server, geometry: Geometry | None = None) -> list[Finding]:
    """Findings about a server; `geometry` is that of the model when its config was given."""
    about, metrics = server.about, server.metrics()
    config = about.cache_config
    length = "unknown" if about.max_model_len is None else f"{about.max_model_len:,}"
    findings = [
        ok("server", f"vLLM {about.version or 'of unknown version'} serves {about.model}, max-model-len {length}"),
    ]
    if not config:
        findings.append(
            wrong(
                "metrics",
                "the server shows no vllm:cache_config_info: its configuration cannot be read",
                "serve without --disable-log-stats, and ask the server itself rather than a router",
            )
        )
        return findings
    findings += [_caching(config), _in_page(metrics), *_block(about, geometry), _retention(config)]
    if about.pool_blocks is not None:
        tokens = config.get("kv_cache_size_tokens", "")
        printed = f", {int(tokens):,} tokens" if tokens.isdigit() else ""
        findings.append(info("pool", f"{about.pool_blocks:,} blocks{printed}"))
    return [*findings, *_use(metrics, config, _reach(about, geometry))]


def _caching(config: Mapping[str, str]) -> Finding:
    if config.get("enable_prefix_caching") != "True":
        return wrong("prefix caching", "off: every turn computes the whole conversation", "--enable-prefix-caching")
    mode = config.get("mamba_cache_mode")
    if mode not in (None, "align"):
        return wrong("prefix caching", f"on, with --mamba-cache-mode {mode}", "--mamba-cache-mode align")
    return ok("prefix caching", "on" + (", in align mode" if mode else ""))


def _in_page(metrics: Metrics) -> Finding:
    if metrics.names(OURS):
        return ok("in-page", "on: the server shows its counters")
    return advice(
        "in-page",
        "the server shows no counters of inpage: it runs another layout. On CPU and Gaudi stock serves hits from wrong "
        "states for Gated DeltaNet hybrids",
        "inpage serve MODEL, and inpage gate URL to see whether hits are right",
    )


def _reach(about: About, geometry: Geometry | None) -> int | None:
    """The longest prompt that cannot hit, in tokens; None where the block is not known."""
    return about.match_unit or (geometry.block_tokens if geometry else None)


def _block(about: About, geometry: Geometry | None) -> list[Finding]:
    said, unit = about.cache_config.get("block_size", ""), about.match_unit
    reach = _reach(about, geometry)
    shortest = (
        f"the shortest prompt that can hit has {reach + 1:,}"
        if reach
        else "a prompt must be longer than a block to hit"
    )
    shortest += f" (--prefix-match-unit {unit})" if unit else ""
    if geometry is None:
        if not said:
            return []
        text = (
            f"{said} tokens in the configuration of the front end, which need not be the pool's: inpage gate probes it"
        )
        return [info("block", f"{text}; {shortest}")]
    block = geometry.block_tokens
    findings = [info("block", f"{block:,} tokens; {shortest}")]
    if said.isdigit() and int(said) != block:
        findings.append(
            advice(
                "block",
                f"the server's configuration says {said} tokens, the pool of this model has {block:,}: chunks that "
                "end on the former keep states of other positions",
                "inpage serve puts the grid right; inpage gate URL shows whether this server's is",
            )
        )
    return findings


def _retention(config: Mapping[str, str]) -> Finding:
    value = config.get("prefix_cache_retention_interval")
    if value is None:
        return info("retention", "the server does not say; vLLM 0.26.0 keeps every checkpoint")
    if value == "None":
        return ok("retention", "a checkpoint at every boundary, as long as there is room")
    return advice(
        "retention",
        f"sparse ({value}): sessions that just grow hit, a prompt that parts from a cached one misses at first sight",
        "--prefix-cache-retention-interval None",
    )


def _use(metrics: Metrics, config: Mapping[str, str], reach: int | None) -> list[Finding]:
    findings = _hits(metrics, config, reach)
    preempted = metrics.total("vllm:num_preemptions_total")
    if preempted:
        findings.append(
            advice(
                "preemptions",
                f"{preempted:,.0f} so far: live context did not fit the pool; they resume from the cache",
                "fewer --max-num-seqs, or a larger pool",
            )
        )
    return findings


def _hits(metrics: Metrics, config: Mapping[str, str], reach: int | None) -> list[Finding]:
    queries, hits = metrics.total(QUERIES) or 0.0, metrics.total(HITS) or 0.0
    if not queries:
        return []
    text = f"{hits / queries:.1%} of {queries:,.0f} prompt tokens came from the cache"
    enough = queries >= ENOUGH_TOKENS
    if hits / queries >= FEW_HITS or not (enough or not hits):
        return [info("hits", text)]
    counts = Counts.of(metrics, queries)
    why = reasons(counts, config, reach) if counts and counts.requests > 1 else []
    if why:
        return [advice("hits", text, f"see below: {', '.join(one.topic for one in why)}"), *why]
    if not enough:
        return [info("hits", text)]
    return [
        advice(
            "hits",
            f"{text}: prompts shorter than a block, sessions that go to another replica, or a pool that does not "
            "hold them",
            "compare prompt lengths with the block, route by session, and see inpage plan for the pool",
        )
    ]
