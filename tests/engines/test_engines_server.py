"""Real servers over real HTTP: what a user of `inpage serve` and of stock vLLM gets."""

from __future__ import annotations

import httpx
import pytest

from inpage.demo.cases import BLOCK_TOKENS, CASES
from inpage.demo.command import PARITY_LONGEST_TOKENS, PARITY_OUTPUT_TOKENS, PARITY_VOCAB, server_arguments
from inpage.demo.server import running_server
from inpage.errors import ServerError
from inpage.gates.metrics_text import Metrics
from inpage.gates.parity import Completions, make_cases, run_parity
from inpage.replay.result import summarize
from inpage.replay.runner import replay_arm
from inpage.replay.sessions import SessionSpec

pytestmark = pytest.mark.engine

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
SESSIONS = SessionSpec(
    sessions=2, start_tokens=2048, end_tokens=4096, new_tokens=1024, output_tokens=8, system_tokens=1536
)


def parity_on(url: str, model: str, prompts: int):
    cases = make_cases(prompts, BLOCK_TOKENS, PARITY_LONGEST_TOKENS, PARITY_VOCAB)
    unrelated = [index % PARITY_VOCAB for index in range(BLOCK_TOKENS + 16)]
    return run_parity(Completions(url, model, PARITY_OUTPUT_TOKENS), cases, unrelated)


def test_in_page_hits_equal_cold_on_32_prompts_and_sessions_are_served_from_the_cache(model, tmp_path):
    arguments = server_arguments(CASES["quick"])
    with running_server(str(model), arguments, "in-page", tmp_path / "log", ENVIRONMENT) as server:
        result = replay_arm(server.url, SESSIONS, arm="in-page")
        parity = parity_on(server.url, str(model), 32)
    assert parity.exact
    assert parity.hits == 32
    summary = summarize(result)
    assert result.complete
    # Turn n finds the whole blocks of turn n-1's prompt.
    assert [turn.cached_tokens for turn in result.turns if turn.turn == 3] == [3070 // 256 * 256] * 2
    assert summary.hit_rate_later is not None
    assert summary.hit_rate_later > 0.6
    log = server.log.read_text()
    assert "inpage: in-page layout, block 256 tokens" in log
    assert "inpage worker, at shutdown: saves" in log
    assert "inpage scheduler, at shutdown: refused hits" in log


def test_stock_vllm_gets_the_same_prompts_wrong(model, tmp_path):
    arguments = server_arguments(CASES["quick"])
    with running_server(str(model), arguments, "native", tmp_path / "log", ENVIRONMENT) as server:
        parity = parity_on(server.url, str(model), 8)
        metrics = Metrics(httpx.get(f"{server.url}/metrics", timeout=30.0).text)
    assert metrics.names("vllm:")
    assert not metrics.names("inpage")
    assert parity.hits > 0
    assert not parity.exact
    assert parity.worst_drift > 0
    assert "inpage" not in [line for line in server.log.read_text().splitlines() if "WARNING" in line]


def test_a_configuration_that_is_not_covered_ends_the_start_with_one_sentence(model, tmp_path):
    arguments = [*server_arguments(CASES["quick"]), "--prefix-match-unit", "96"]
    with (
        pytest.raises(ServerError, match="the server ended with status 1"),
        running_server(str(model), arguments, "in-page", tmp_path / "log", ENVIRONMENT),
    ):
        pass
    assert "--prefix-match-unit 96 is no multiple of 64" in (tmp_path / "log").read_text()
