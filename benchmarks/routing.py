"""`python -m benchmarks.routing`: affinity, bounded load and round robin in front of two real replicas.

Two in-page servers of the demo model, each on a core of its own, real HAProxy with the configurations that
`inpage route-config` writes, and three kinds of load, the same for every policy:

- agent sessions (`inpage.replay`), against one replica alone as well: how many hits does a policy keep?
- a burst of new sessions behind busy ones, all of which the hash sends to the same replica (the worst case);
- the same burst with sessions as the hash deals them out.

The caches are emptied between the runs, and the policies take turns. Writes routing.json and routing.png into --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from inpage.demo.cases import BLOCK_TOKENS, MAX_MODEL_LEN
from inpage.demo.model import make_model
from inpage.demo.server import RunningServer, ServerProcess, free_port
from inpage.gates.metrics_text import Metrics
from inpage.replay.client import SESSION_HEADER, Server
from inpage.replay.result import TurnRecord, hit_rate, percentile
from inpage.replay.runner import replay_arm
from inpage.replay.sessions import SessionSpec, Tool, words
from inpage.routing.haproxy import running_haproxy
from inpage.routing.haproxy_config import POLICIES, REPLICA_HEADER, Policy, Routes, parse_address, parse_replica, render

SEQUENCES = 4
BLOCKS = 470
SESSIONS = SessionSpec(
    sessions=6, start_tokens=2048, end_tokens=8192, new_tokens=1024, output_tokens=16, system_tokens=1536
)
BUSY, BUSY_OUTPUT = SEQUENCES, 384
"""Sessions that run when the burst comes, and the tokens that each generates: for about ten times as long as a prompt
of the burst takes. On one Gaudi 2 (1,053 tokens/s of prefill, 18 of decode) 400 tokens outlast 2,000 so."""
KINDS = ("one_home", "dealt")
BURST, BURST_WORDS, BURST_OUTPUT = 8, 340, 8
"""Sessions of the burst; 340 words are about 2,000 tokens of the demo's tokenizer."""
TOOL: Tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
"""The client always sends tools; one as short as this is no prefix that two sessions could share a block of."""

ANSWERS = "haproxy_server_http_responses_total"


@dataclass
class Figures:
    """What one policy gave: later turns of the sessions, TTFT of both bursts in seconds, requests by replica."""

    policy: str
    later: list[TurnRecord] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    bursts: dict[str, list[list[float]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    shares: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})

    def summary(self) -> dict[str, Any]:
        """The figures as numbers, None where nothing was measured; of several bursts the median, and each."""
        ttft = [turn.ttft_s for turn in self.later if turn.ttft_s is not None]
        numbers: dict[str, Any] = {
            "policy": self.policy,
            "hit_rate_later": hit_rate(self.later),
            "ttft_later_p50": percentile(ttft, 50) if ttft else None,
            "ttft_later_p90": percentile(ttft, 90) if ttft else None,
            "wall_s": sum(self.walls) / len(self.walls),
        }
        for kind, bursts in self.bursts.items():
            for percent in (50, 90):
                each = [percentile(times, percent) for times in bursts]
                numbers[f"{kind}_p{percent}"] = statistics.median(each) if each else None
                numbers[f"{kind}_p{percent}_each"] = each
            numbers[f"{kind}_shares"] = dict(sorted(self.shares[kind].items()))
        return numbers


@dataclass(frozen=True)
class Router:
    """Where a running HAProxy answers, and where it says what it has done."""

    url: str
    stats: str


@contextmanager
def replicas(folder: Path) -> Iterator[list[RunningServer]]:
    """Two servers; each is bound to a core of its own, so that neither takes from the other."""
    model = str(make_model(folder / "model"))
    arguments = [
        "--enforce-eager",
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", str(SEQUENCES)),
        *("--max-num-batched-tokens", str(BLOCK_TOKENS + 128)),
        *("--num-gpu-blocks-override", str(BLOCKS)),
        *("--mamba-ssm-cache-dtype", "float32"),
    ]
    with ExitStack() as stack:
        processes = []
        for core in ("0", "1"):
            environment = {
                "VLLM_CPU_OMP_THREADS_BIND": core,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            }
            processes.append(ServerProcess(model, arguments, "in-page", folder / f"replica{core}.log", environment))
            stack.callback(processes[-1].stop)
        yield [process.wait(timeout_s=480) for process in processes]


@contextmanager
def router(policy: Policy, servers: list[RunningServer], folder: Path) -> Iterator[Router]:
    """HAProxy in front of the servers."""
    bind, stats = (parse_address(f"127.0.0.1:{free_port()}") for _ in range(2))
    addresses = tuple(parse_replica(server.url) for server in servers)
    text = render(Routes(addresses, policy, SEQUENCES, bind=bind, stats=stats))
    with running_haproxy(text, f"http://{bind}", folder / f"{policy}.log") as url:
        yield Router(url, f"http://{stats}")


def empty_caches(servers: list[RunningServer]) -> None:
    """The next run starts cold."""
    for server in servers:
        httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).raise_for_status()


def homes(servers: list[RunningServer], folder: Path, number: int) -> list[str]:
    """Names of sessions that the hash sends to the first replica, as the plain hash itself answers."""
    found: list[str] = []
    with router("affinity", servers, folder) as hashing, httpx.Client() as http:
        for index in range(100 * number):
            name = f"home-{index}"
            answer = http.get(f"{hashing.url}/health", headers={SESSION_HEADER: name})
            if answer.headers[REPLICA_HEADER] == "r1":
                found.append(name)
            if len(found) == number:
                return found
    raise RuntimeError(f"the hash sent {len(found)} of {100 * number} sessions to the first replica")


async def burst(router: Router, names: list[str]) -> tuple[list[float], Counter[str]]:
    """The first `BUSY` names generate, then all the others come at once: their TTFT, and requests by replica."""
    async with Server(router.url, plain=False, timeout_s=300) as server:
        await server.identify(None)  # goes through the router too, but is no request for text
        before = answered(router)

        async def ask(name: str, n: int, output: int) -> float:
            messages = [{"role": "user", "content": words(name, n)}]
            answer = await server.stream(messages, [TOOL], output, name)
            if answer.error is not None or answer.ttft_s is None:
                raise RuntimeError(f"{name}: {answer.error}")
            return answer.ttft_s

        busy = [asyncio.create_task(ask(name, 40, BUSY_OUTPUT)) for name in names[:BUSY]]
        await asyncio.sleep(0.5)
        times = await asyncio.gather(*(ask(name, BURST_WORDS, BURST_OUTPUT) for name in names[BUSY:]))
        await asyncio.gather(*busy)
        return list(times), answered(router) - before


def answered(router: Router) -> Counter[str]:
    """How many answers each replica has given through this router since it started, as HAProxy counts them.

    Its log would not do: a line is dropped when another thread is writing one.
    """
    metrics = Metrics(httpx.get(f"{router.stats}/metrics", timeout=30).raise_for_status().text)
    counts = {name: metrics.total(ANSWERS, proxy="replicas", server=name, code="2xx") for name in ("r1", "r2")}
    return Counter({name: int(count) for name, count in counts.items() if count})


def measure(servers: list[RunningServer], folder: Path, rounds: int, replays: int, show: Console) -> list[Figures]:
    """Every policy's figures, one replica alone first.

    All routers run all the time and take turns, in another order each round: a machine that slows down for a while
    slows all of them.
    """
    names = homes(servers, folder, rounds * (BUSY + BURST))
    dealt = [f"dealt-{index}" for index in range(len(names))]
    figures = {name: Figures(name) for name in ("one replica", *POLICIES)}
    with ExitStack() as stack:
        routers = {policy: stack.enter_context(router(policy, servers, folder)) for policy in POLICIES}
        urls = {"one replica": servers[0].url} | {policy: each.url for policy, each in routers.items()}
        for seed in range(replays):
            for name in _rotated(list(urls), seed):
                show.print(f"sessions, {seed + 1} of {replays}: {name}")
                empty_caches(servers)
                result = replay_arm(urls[name], replace(SESSIONS, seed=seed), arm="arm")
                if not result.complete:
                    raise RuntimeError(f"{name}: {next(turn.error for turn in result.turns if turn.error)}")
                figures[name].later += [turn for turn in result.turns if turn.turn > 1]
                figures[name].walls.append(result.wall_s)
        for round_ in range(rounds):
            for kind, sessions in zip(KINDS, (names, dealt), strict=True):
                asked = sessions[round_ * (BUSY + BURST) : (round_ + 1) * (BUSY + BURST)]
                for policy in _rotated(list(POLICIES), round_):
                    show.print(f"bursts, {round_ + 1} of {rounds}: {policy}, {kind}")
                    empty_caches(servers)
                    times, shares = asyncio.run(burst(routers[policy], asked))
                    figures[policy].bursts[kind].append(times)
                    figures[policy].shares[kind] += shares
    return list(figures.values())


def _rotated(names: list[Any], by: int) -> list[Any]:
    by %= len(names)
    return names[by:] + names[:by]


def table(summaries: list[dict[str, Any]]) -> Table:
    """The figures for a terminal."""
    table = Table(
        title="Two replicas behind one router (times in s; shares: requests by replica)", title_justify="left"
    )
    columns = ("policy", "hits, later", "TTFT later p50", "p90", "wall")
    for column in (*columns, "one home: p50", "p90", "shares", "dealt: p50", "p90", "shares"):
        table.add_column(column, justify="left" if column in ("policy", "shares") else "right")

    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    for s in summaries:
        cells = [s["policy"], "–" if s["hit_rate_later"] is None else f"{s['hit_rate_later']:.1%}"]
        cells += [seconds(s[key]) for key in ("ttft_later_p50", "ttft_later_p90", "wall_s")]
        for kind in KINDS:
            shares = "/".join(str(n) for n in s[f"{kind}_shares"].values())
            cells += [seconds(s[f"{kind}_p50"]), seconds(s[f"{kind}_p90"]), shares or "–"]
        table.add_row(*cells)
    return table


def verdicts(summaries: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """What must hold, and whether it does."""
    by = {summary["policy"]: summary for summary in summaries}
    lines = []
    for policy in ("affinity", "bounded"):
        kept = by[policy]["hit_rate_later"] / by["one replica"]["hit_rate_later"]
        lines.append((abs(kept - 1) <= 0.02, f"{policy}: {kept:.1%} of one replica's hit rate, wanted within 2%"))
    gain = by["affinity"]["one_home_p90"] / by["bounded"]["one_home_p90"]
    lines.append((gain >= 1.5, f"burst of one home: bounded's p90 is {gain:.2f} times shorter, wanted at least 1.5"))
    return lines


def plot(summaries: list[dict[str, Any]], file: Path) -> None:
    """Hit rates and p90 TTFT of the bursts, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar([s["policy"] for s in summaries], [100 * (s["hit_rate_later"] or 0) for s in summaries], color="#4c78a8")
    left.set_title("Hit rate of later turns (%)")
    routed = [s for s in summaries if s["one_home_p90"] is not None]
    places = range(len(routed))
    for offset, kind, label, color in (
        (-0.2, "one_home", "all of one home", "#e45756"),
        (0.2, "dealt", "as the hash deals them", "#f2a6a0"),
    ):
        right.bar([p + offset for p in places], [s[f"{kind}_p90"] for s in routed], 0.4, label=label, color=color)
    right.set_xticks(list(places), [s["policy"] for s in routed])
    right.set_title("TTFT of a burst, p90 (s)")
    right.set_ylim(top=1.35 * max(s[f"{kind}_p90"] for s in routed for kind in KINDS))
    right.legend(loc="upper right")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each kind, default 5")
    parser.add_argument("--replays", type=int, default=2, help="replays of the sessions, default 2")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder, default bench/out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    progress = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as folder, replicas(Path(folder)) as servers:
        figures = measure(servers, Path(folder), options.rounds, options.replays, progress)
    summaries = [each.summary() for each in figures]
    console.print(table(summaries))
    results = verdicts(summaries)
    for holds, line in results:
        console.print(f"{'ok ' if holds else 'NOT'} {line}")
    (options.out / "routing.json").write_text(json.dumps(summaries, indent=1) + "\n")
    plot(summaries, options.out / "routing.png")
    raise SystemExit(0 if all(holds for holds, _ in results) else 1)


if __name__ == "__main__":
    main()
