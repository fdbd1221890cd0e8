"""Recorded traces: read whole or not at all, and replayed once for each layout."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.sim.arms import QWEN_27B, Arm, Figures, Server, arms_at
from inpage.sim.costs import Costs, fitted
from inpage.sim.study import Replay
from inpage.sim.trace_report import plot, table
from inpage.sim.traces import Session, read_traces

RECORDED = Path(os.environ.get("INPAGE_TRACES") or Path(__file__).parents[3] / "shared" / "data")
SMALL = Geometry(state_bytes=200, kv_bytes_per_token=4, block_tokens=64, attention_layers=1, gdn_layers=3)


def agentic(turns: int = 5, *, first: int = 1, tools: int = 128) -> dict[str, Any]:
    """A conversation that grows by two pieces a turn, with a subagent after the first."""
    requests: list[dict[str, Any]] = []
    for number in range(turns):
        pieces = 6 + 2 * number
        requests.append(
            {"t": 30.0 * number, "in": pieces * 64 - 5, "out": 20, "api_time": 4.0}
            | {"hash_ids": list(range(first, first + pieces))}
        )
    inner = {"t": 0.0, "in": 640, "out": 9, "api_time": 1.0, "hash_ids": list(range(900, 910))}
    requests.insert(1, {"t": 35.0, "type": "subagent", "agent_id": "a1", "tool_tokens": 64, "requests": [inner]})
    return {"id": f"talk-{first}", "block_size": 64, "tool_tokens": tools, "system_tokens": 64, "requests": requests}


def write(path: Path, value: Any) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


# ------------------------------------------------------------------ reading
@pytest.mark.parametrize("name", ["talk.json", "talk.json.gz"])
def test_an_agentic_trace_is_a_conversation_and_its_subagents(tmp_path: Path, name: str) -> None:
    talk, inner = read_traces([write(tmp_path / name, agentic())])
    assert (talk.name, inner.name, inner.start) == ("talk-1", "talk-1/a1", 35.0)
    assert [turn.prompt_tokens for turn in talk.turns] == [379, 507, 635, 763, 891]
    assert [turn.gap for turn in talk.turns] == [0.0, 26.0, 26.0, 26.0, 26.0]
    assert talk.turns[1].prompt()[:320] == talk.turns[0].prompt()[:320]
    assert talk.turns[1].shared_with(talk.turns[0]) == 379


def test_conversations_share_the_tools_that_are_equally_long_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a.json", agentic(first=1))
    write(tmp_path / "b.json", agentic(first=1) | {"id": "other"})
    write(tmp_path / "c.json", agentic(first=1, tools=192) | {"id": "third"})
    first = [session.turns[0] for session in read_traces([tmp_path]) if "/" not in session.name]
    assert first[0].shared_with(first[1]) == 128
    assert first[0].shared_with(first[2]) == 0


def test_a_mooncake_trace_is_a_session_a_line(tmp_path: Path) -> None:
    text = mooncake((0, 1000, 5, [1, 2]), (2500, 1300, 7, [1, 2, 3]))
    one, two = read_traces([write(tmp_path / "trace.jsonl.gz", text)])
    assert (one.start, two.start) == (0.0, 2.5)
    assert two.turns[0].shared_with(one.turns[0]) == 1000
    assert two.turns[0].prompt()[:1000] == one.turns[0].prompt()


BROKEN = [
    ("t.jsonl", mooncake((0, 9, 1, [1])) + "{oops\n", r"t\.jsonl, line 2: no JSON"),
    ("t.jsonl", mooncake((0, 9, 1, [1]), (0, -3, 1, [1])), r"line 2: 'input_length' must be a number of at least 1"),
    ("t.jsonl", mooncake((0, 9000, 1, [1])), "9000 tokens are 18 pieces of 512, but 'hash_ids' has 1"),
    ("t.jsonl", '{"timestamp": 0, "input_length": 4, "output_length": 1}\n', "'hash_ids' must be a list"),
    ("t.jsonl", mooncake((0, 9, 1, [1])) + "[1]\n", "line 2: a request is a JSON object"),
    ("t.json", '{"requests": [\n{"t": 0,\n}]}', r"t\.json, line 3: no JSON"),
    ("t.json", '{"id": "x"}', "'requests' must be a list"),
    ("t.json", '{"id": "x", "requests": []}', "has no requests"),
    ("t.json", '{"id": "x", "requests": [{"t": 0, "in": 1.5, "hash_ids": [1]}]}', "request 1: 'in' must be whole"),
    ("t.json", "", "is empty"),
    ("t.json.gz", "cut", ""),
]


@pytest.mark.parametrize(("name", "text", "message"), BROKEN)
def test_a_malformed_trace_is_refused_with_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path / name, text)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b'{"a": 1}')[:-6])
        message = r"t\.json\.gz is no trace"
    with pytest.raises(ConfigError, match=message):
        read_traces([path])


def test_a_missing_file_and_a_folder_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        read_traces([tmp_path / "none.json"])
    with pytest.raises(ConfigError, match="has no trace in it"):
        read_traces([tmp_path])


# ------------------------------------------------------------------ the arms and the replay
def test_the_arms_of_18475_mib_have_the_pools_of_the_27b_models() -> None:
    blocks = {arm.name: arm.num_blocks for arm in arms_at(18475 * 2**20, QWEN_27B, [16])}
    # 16 checkpoints of 48 states take 2,349 MiB, 42 blocks.
    assert blocks == {"off": 329, "per-block": 176, "bounded pool, K=16": 287, "in-page": 329}


def test_memory_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few to serve anything"):
        arms_at(QWEN_27B.block_bytes * 5, QWEN_27B, [16])


def server(**changes: Any) -> Server:
    settings: dict[str, Any] = {"block_tokens": 64, "budget": 80, "max_num_seqs": 4, "max_model_len": 2048}
    settings |= {"retention_tokens": None, "at_once": 4, "costs": Costs(1000.0, 10.0)}
    return Server(**(settings | changes))


@pytest.fixture
def sessions(tmp_path: Path) -> list[Session]:
    for number in range(4):
        write(tmp_path / f"{number}.json", agentic(first=1 + 100 * number) | {"id": f"talk-{number}"})
    return read_traces([tmp_path])


def replay(sessions: list[Session], arm: Arm, **changes: Any) -> Figures:
    return Replay(sessions, arm, server(**changes)).run()


def test_off_computes_every_token_and_in_page_only_what_is_new(sessions: list[Session]) -> None:
    off = replay(sessions, Arm("off", 0, 400, caching=False))
    in_page = replay(sessions, Arm("in-page", 0, 400))
    assert off.turns == in_page.turns == 24
    assert (off.hit_tokens, off.prefill_tokens) == (0, off.prompt_tokens)
    assert in_page.prefill_tokens == in_page.prompt_tokens - in_page.hit_tokens
    # Each of the four later turns finds the whole blocks of the turn before: 320 to 704 tokens.
    assert in_page.hit_tokens >= 4 * (320 + 448 + 576 + 704)
    assert in_page.warm_sessions == in_page.sessions == 4
    assert off.warm_sessions == 0
    assert sum(in_page.ttft) < sum(off.ttft)


def test_a_bounded_pool_hits_what_is_resident_and_equals_in_page_when_nothing_is_dropped(
    sessions: list[Session],
) -> None:
    in_page = replay(sessions, Arm("in-page", 0, 400))
    hits = [replay(sessions, Arm("bounded pool", 0, 400, checkpoints=k)).hit_tokens for k in (1, 4, 16, 400)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1] == in_page.hit_tokens


def test_a_pool_that_is_overrun_evicts_and_hits_less(sessions: list[Session]) -> None:
    large, small = (replay(sessions, Arm("in-page", 0, blocks)) for blocks in (400, 40))
    assert small.evictions > large.evictions
    assert small.hit_tokens < large.hit_tokens
    assert small.warm_sessions < large.warm_sessions


def test_turns_that_do_not_fit_are_refused_and_count_as_not_hit(sessions: list[Session]) -> None:
    tiny = replay(sessions, Arm("in-page", 0, 18))
    assert tiny.refused > 0
    assert tiny.turns == 24


def test_counting_decode_steps_changes_nothing_but_the_number_of_steps_taken(
    sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = replay(sessions, Arm("in-page", 0, 60))
    monkeypatch.setattr(Replay, "_count_decodes", lambda self, requests: None)
    taken = replay(sessions, Arm("in-page", 0, 60))
    assert counted.counted_steps > 0
    assert counted.steps + counted.counted_steps == taken.steps
    same = ("hit_tokens", "prefill_tokens", "preemptions", "evictions", "warm_sessions")
    assert [getattr(counted, name) for name in same] == [getattr(taken, name) for name in same]
    assert counted.wall == pytest.approx(taken.wall)


def test_recorded_times_are_kept_when_all_sessions_run_at_once(tmp_path: Path) -> None:
    rows = [(1000 * n, 1000 + n, 5, [1, 2]) for n in range(4)]
    found = replay(read_traces([write(tmp_path / "t.jsonl", mooncake(*rows))]), Arm("in-page", 0, 400), at_once=0)
    assert found.turns == 4
    assert found.wall >= 3.0


def test_table_and_plot_show_every_arm(sessions: list[Session], tmp_path: Path) -> None:
    found = [replay(sessions, arm) for arm in arms_at(400 * SMALL.block_bytes, SMALL, [4])]
    assert table(found, 64).row_count == 4
    plot(found, tmp_path / "deep" / "plot.png", "made up")
    assert (tmp_path / "deep" / "plot.png").stat().st_size > 1000


def test_rates_that_are_not_above_zero_and_reports_without_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="above zero"):
        Costs(0.0, 1.0)
    with pytest.raises(ConfigError, match="cannot read"):
        fitted(tmp_path / "none.json")


@pytest.mark.skipif(not (RECORDED / "agent-traces").is_dir(), reason="the recorded traces are not here")
def test_on_a_recorded_session_in_page_hits_more_than_per_block() -> None:
    recorded = read_traces(sorted((RECORDED / "agent-traces").iterdir())[:2])
    settings = server(block_tokens=896, budget=1024, max_model_len=262144)
    arms = {arm.name: arm for arm in arms_at(9 * 2**30, QWEN_27B, [16])}
    hits = {name: Replay(recorded, arms[name], settings).run().hit_rate for name in ("in-page", "per-block")}
    assert hits["in-page"] is not None
    assert hits["per-block"] is not None
    assert hits["in-page"] >= hits["per-block"] > 0
