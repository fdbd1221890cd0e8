from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inpage.errors import ConfigError
from inpage.replay.result import ArmResult, Stats, load_result, percentile, save_result, summarize

MakeArm = Callable[..., ArmResult]


def test_the_figures_of_an_arm_are_those_computed_by_hand(make_arm: MakeArm) -> None:
    summary = summarize(make_arm())
    assert (summary.planned, summary.done, summary.errors, summary.wall_s) == (4, 4, 0, 20.0)
    assert summary.ttft_first == Stats(mean=5.0, p50=5.0, p90=pytest.approx(5.8))
    assert summary.ttft_later == Stats(mean=2.0, p50=2.0, p90=pytest.approx(2.8))
    assert summary.decode_tok_s == Stats(mean=25.0, p50=25.0, p90=pytest.approx(37.0))
    assert summary.cached_per_later_turn == Stats(mean=90.0, p50=90.0, p90=pytest.approx(98.0))
    assert summary.hit_rate_later == 180 / 400
    assert summary.hit_rate_all == 240 / 600
    assert [(t.turn, t.prompt_tokens, t.cached_tokens, t.hit_rate) for t in summary.by_turn] == [
        (1, 100.0, 30.0, 0.3),
        (2, 200.0, 90.0, 0.45),
    ]
    assert [t.ttft_s for t in summary.by_turn] == [(4.0, 6.0), (1.0, 3.0)]


def test_a_failed_turn_enters_no_figure_but_the_errors(make_arm: MakeArm) -> None:
    arm = make_arm()
    failed = arm.turns[3].model_copy(update={"error": "HTTP 500", "cached_tokens": 9, "ttft_s": 99.0})
    summary = summarize(arm.model_copy(update={"turns": [*arm.turns[:3], failed]}))
    assert (summary.done, summary.errors) == (3, 1)
    assert summary.ttft_later == Stats(1.0, 1.0, 1.0)
    assert summary.hit_rate_later == 80 / 200


def test_cached_tokens_that_never_come_are_not_reported_and_never_zero(make_arm: MakeArm) -> None:
    arm = make_arm()
    turns = [turn.model_copy(update={"cached_tokens": None}) for turn in arm.turns]
    summary = summarize(arm.model_copy(update={"turns": turns}))
    assert summary.hit_rate_all is None
    assert summary.hit_rate_later is None
    assert summary.cached_per_later_turn is None
    assert {turn.hit_rate for turn in summary.by_turn} == {None}


def test_a_count_left_out_next_to_others_is_zero(make_arm: MakeArm) -> None:
    arm = make_arm()
    turns = [arm.turns[0].model_copy(update={"cached_tokens": None}), *arm.turns[1:]]
    assert summarize(arm.model_copy(update={"turns": turns})) == summarize(arm)


def test_an_arm_without_any_turn_has_no_figures(make_arm: MakeArm) -> None:
    summary = summarize(make_arm(turns=[]))
    assert (summary.done, summary.ttft_first, summary.hit_rate_all, summary.by_turn) == (0, None, None, ())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.integers(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_a_result_comes_back_from_its_file_as_it_was(make_arm: MakeArm, tmp_path: Path) -> None:
    save_result(make_arm(), tmp_path / "new" / "off.json")
    assert load_result(tmp_path / "new" / "off.json") == make_arm()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["off.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"arm": "x"}', '{"settings": {"sessions": 0}}', "\udcff"], ids=repr)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"broken\.json is not a result of `inpage replay`"):
        load_result(path)


def test_a_result_with_settings_that_make_no_session_is_named(make_arm: MakeArm, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(make_arm().model_dump_json().replace('"sessions":2', '"sessions":0'))
    with pytest.raises(ConfigError, match=r"broken\.json is not a result .* --sessions is 0"):
        load_result(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.json: No such file"):
        load_result(tmp_path / "gone.json")
