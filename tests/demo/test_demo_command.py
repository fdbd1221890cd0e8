"""What the demo makes of its arms; the demo itself runs in tests/engines and by `make demo`."""

from __future__ import annotations

import hashlib

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.demo.cases import BLOCK_TOKENS, CASES, MARK_TOKENS, MAX_MODEL_LEN, WITH_MARKS
from inpage.demo.command import Arm, exactness_rows, failures, prefill_rows, server_arguments
from inpage.demo.model import DemoModel, make_model
from inpage.errors import ConfigError
from inpage.gates.parity import Case, Comparison, Generation, Parity
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import per_block_equivalent, sessions_kept
from inpage.replay.result import ArmResult, TurnRecord


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    folder = make_model(tmp_path_factory.mktemp("demo"))
    return Geometry.of(ModelShape.from_file(folder, ssm_dtype="float32"))


def arm(name: str, equal: bool = True, cached: int | None = 256, errors: int = 0) -> Arm:
    cold = Generation(("a",), ((("a", -0.5),),), 0)
    hit = Generation(("a",), ((("a", -0.5 if equal else -0.75),),), cached)
    spec = CASES["quick"].sessions
    turns = [
        TurnRecord(session=s, turn=t, total_s=1.0, error="HTTP 500" if errors and (s, t) == (0, 1) else None)
        for s in range(spec.sessions)
        for t in range(1, spec.turns + 1)
    ]
    result = ArmResult(
        arm=name,
        model="m",
        base_url="http://127.0.0.1:1",
        settings=spec,
        transcript_digest="d",
        started_at="2026-01-01T00:00:00",
        wall_s=1.0,
        turns=turns,
    )
    return Arm(name, result, Parity([Comparison(Case("single", (1,), (1,)), cold, hit)]), ())


def test_the_same_seed_makes_the_same_model(tmp_path):
    digests = {
        hashlib.sha256((make_model(tmp_path / name) / "model.safetensors").read_bytes()).hexdigest() for name in "ab"
    }
    other = make_model(tmp_path / "c", DemoModel(seed=1)) / "model.safetensors"
    assert len(digests) == 1
    assert hashlib.sha256(other.read_bytes()).hexdigest() not in digests


def test_the_demos_block_is_the_one_vllm_will_choose(geometry):
    assert geometry.block_tokens == BLOCK_TOKENS
    assert geometry.gdn_groups == 3


@pytest.mark.parametrize(("case", "in_page_holds", "per_block_holds"), [("overflow", True, False), ("fit", True, True)])
def test_the_pools_hold_what_the_cases_say(geometry, case, in_page_holds, per_block_holds):
    chosen = CASES[case]
    longest = chosen.sessions.end_tokens + chosen.sessions.output_tokens
    need = chosen.sessions.sessions
    assert (sessions_kept(chosen.blocks, geometry, longest, "in-page") >= need) == in_page_holds
    cut = per_block_equivalent(chosen.blocks, geometry)
    assert (sessions_kept(cut, geometry, longest, "per-block") >= need) == per_block_holds


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_session_fits_the_context(case):
    assert case.sessions.end_tokens + case.sessions.output_tokens < MAX_MODEL_LEN
    assert f"--num-gpu-blocks-override {case.blocks}" in " ".join(server_arguments(case))


def test_the_demo_fails_only_for_in_page_and_for_failed_requests():
    assert failures(CASES["arms"], [arm("native", equal=False), arm("in-page")]) == []
    assert failures(CASES["arms"], [arm("in-page", equal=False)]) == ["in-page: hits do not equal cold runs"]
    assert failures(CASES["arms"], [arm("in-page", cached=0)]) == ["in-page: hits do not equal cold runs"]
    assert failures(CASES["arms"], [arm("off", errors=1)]) == ["off: 1 requests failed, see off.json and off.server.log"]


def with_prefill(name: str, lost: int) -> Arm:
    """Every later turn adds 300 tokens and loses so many of the prompt before."""
    made = arm(name)
    turns = []
    for turn in made.result.turns:
        prompt = 2048 + 300 * (turn.turn - 1)
        turns.append(
            turn.model_copy(update={"prompt_tokens": prompt, "cached_tokens": max(0, prompt - 300 - lost) if turn.turn > 1 else 0})
        )
    return Arm(name, made.result.model_copy(update={"turns": turns}), made.parity, ())


def test_the_marks_case_holds_prefill_to_its_arithmetic():
    case = CASES["marks"]
    rows = prefill_rows(case, [with_prefill("in-page", 0), with_prefill(WITH_MARKS, 0)])
    assert [row[:2] for row in rows] == [["in-page", "256"], [WITH_MARKS, "64"]]
    prompts = [2048 + 300 * index for index in range(CASES["quick"].sessions.turns - 1)]
    expected = [300 + prompt % 64 for prompt in prompts]
    assert rows[1][2:4] == [f"{sum(expected) / len(expected):.1f}", "300.0"]
    lossless = with_prefill(WITH_MARKS, 0)
    assert "by arithmetic" in failures(case, [lossless])[0]
    assert failures(CASES["arms"], [lossless]) == []


def test_the_arm_with_marks_differs_by_one_flag():
    case = CASES["marks"]
    assert server_arguments(case, WITH_MARKS) == [*server_arguments(case), "--prefix-match-unit", str(MARK_TOKENS)]


def test_the_exactness_table_says_exact_wrong_or_nothing_cached():
    rows = exactness_rows([arm("native", equal=False), arm("in-page"), Arm("off", arm("off").result, None, ())])
    assert [row[0] for row in rows] == ["native", "in-page", "off"]
    assert rows[0][3:] == ["0 of 1", "WRONG, largest logprob drift 0.25"]
    assert rows[1][3:] == ["1 of 1", "exact, largest logprob drift 0"]
    assert rows[2][4] == "nothing is cached"


def test_an_unknown_case_is_refused_before_anything_starts(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--case", "huge", "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "--case huge is not one of arms, quick, overflow, fit, marks" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
