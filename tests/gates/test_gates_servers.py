"""The gates on real servers: in-page passes, stock fails, and a broken rule fails the gate that is about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_server import break_rule, environment

from inpage.demo.cases import CASES
from inpage.demo.command import server_arguments
from inpage.demo.model import make_model
from inpage.demo.server import ServerProcess
from inpage.gates.bench import Sizes
from inpage.gates.result import GateReport, Verdict
from inpage.gates.run import GATES, run_gates
from inpage.gates.server import Server

pytestmark = pytest.mark.engine

SIZES = Sizes(prompts=4, drift_prompts=1, rounds=2, preempt_rounds=1, aborts=12, load_seconds=2, longest=900)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory):
    """An in-page server that can be broken, with hits inside blocks, and a stock one; with the former's folder."""
    model = make_model(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("servers")
    arguments, fixed = server_arguments(CASES["quick"]), {"VLLM_CPU_KVCACHE_SPACE": "1"}
    inside = [*arguments, "--prefix-match-unit", "64"]
    in_page = ServerProcess(
        str(model), inside, "in-page", folder / "in-page.log", {**fixed, **environment(folder / "switch")}
    )
    stock = ServerProcess(str(model), arguments, "native", folder / "native.log", fixed)
    try:
        yield {
            "in-page": in_page.wait(timeout_s=500).url,
            "stock": stock.wait(timeout_s=500).url,
            "switch": folder / "switch",
        }
    finally:
        in_page.stop()
        stock.stop()


def run(url: str, *names: str, sizes: Sizes = SIZES) -> GateReport:
    server = Server.connect(url, None, 60.0)
    server.learn_block(None, sizes.vocab, sizes.seed)
    return run_gates([GATES[name] for name in names], server, sizes)


def test_in_page_passes_every_gate_and_needles_are_not_judged_on_random_weights(servers):
    report = run(servers["in-page"], *GATES)
    seen = {result.gate: (result.verdict, result.missing, result.failures) for result in report.results}
    needles = seen.pop("needles")
    assert {verdict for verdict, _, _ in seen.values()} == {Verdict.PASS}, seen
    assert needles[0] == Verdict.NOT_JUDGED
    assert "the cold run does not find the needle" in str(needles[1])
    assert (report.block_tokens, report.pool_blocks, report.server_version) == (256, 160, "0.30.0")
    figures = {result.gate: result.figures for result in report.results}
    assert figures["preemption"]["preemptions"] >= 1
    assert figures["preemption"]["resumes seen mid-decode"] >= 1
    assert figures["aborts"]["aborted"] >= 1
    assert figures["edges"]["prompts that part inside a block"] == 3


def test_stock_fails_parity_drift_and_one_token(servers):
    report = run(servers["stock"], "parity", "drift", "one-token", sizes=Sizes(prompts=8, drift_prompts=4))
    assert {result.gate: result.verdict for result in report.results} == dict.fromkeys(
        ("parity", "drift", "one-token"), Verdict.FAIL
    )
    assert report.exit_status() == 1


def broken(servers: dict, mutant: str, gate: str) -> GateReport:
    folder: Path = servers["switch"]
    break_rule(folder, mutant)
    try:
        return run(servers["in-page"], gate)
    finally:
        break_rule(folder, "")


@pytest.mark.parametrize(
    ("mutant", "gate"),
    [("no save", "parity"), ("no restore", "isolation"), ("no restore", "drift"), ("no zeroed slot", "one-token")],
)
def test_a_broken_rule_fails_the_gate_that_is_about_it(servers, mutant, gate):
    assert broken(servers, mutant, gate).results[0].verdict == Verdict.FAIL
    assert run(servers["in-page"], gate).results[0].verdict == Verdict.PASS, "mended, it passes again"


def test_aborted_requests_that_keep_their_slots_stop_the_engine_in_the_abort_storm(servers):
    """The last test of this file: the in-page server does not survive it."""
    result = broken(servers, "no hand-back of aborted", "aborts").results[0]
    assert result.verdict == Verdict.FAIL
