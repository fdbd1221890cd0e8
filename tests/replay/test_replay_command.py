from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inpage.errors import ConfigError, ServerError
from inpage.replay.command import replay, report
from inpage.replay.result import ArmResult, load_result, save_result

MakeArm = Callable[..., ArmResult]
SIZES = ["--sessions", "2", "--start-tokens", "3000", "--end-tokens", "4000", "--new-tokens", "500"]
SIZES += ["--output-tokens", "4", "--system-tokens", "2000"]

app = typer.Typer()
app.command()(replay)
app.command()(report)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_replay_writes_json_report_and_plots_and_prints_the_table(double: Any, tmp_path: Path) -> None:
    done = run("replay", double.url, "--arm", "in-page", *SIZES, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert load_result(tmp_path / "in-page.json").complete
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".html", ".png"}
    assert "in-page" in done.stdout
    assert "6 / 6" in done.stdout
    assert f"report: {tmp_path / 'report.html'}" in done.stdout


def test_the_report_has_every_arm_of_the_folder_in_the_known_order(double: Any, tmp_path: Path) -> None:
    for arm in ("in-page", "zebra", "off"):
        double.cache.clear()
        assert run("replay", double.url, "--arm", arm, *SIZES, "--out", tmp_path).exit_code == 0
    html = (tmp_path / "report.html").read_text()
    assert "<th></th><th>off</th><th>in-page</th><th>zebra</th>" in html
    assert "Ratios are against off." in html


def test_the_same_arm_again_replaces_its_result_even_a_broken_one(double: Any, tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text("broken")
    assert run("replay", double.url, *SIZES, "--out", tmp_path, "--seed", 3).exit_code == 0
    assert load_result(tmp_path / "server.json").settings.seed == 3


def test_a_broken_file_of_another_arm_is_named_before_anything_is_sent(double: Any, tmp_path: Path) -> None:
    (tmp_path / "off.json").write_text("broken")
    done = run("replay", double.url, *SIZES, "--out", tmp_path)
    assert isinstance(done.exception, ConfigError)
    assert "off.json is not a result" in str(done.exception)
    assert double.requests == double.counts == []


def test_a_failed_turn_makes_exit_status_1_and_is_told(double: Any, tmp_path: Path) -> None:
    double.refuse = lambda body: (500, "[oops]") if len(body["messages"]) == 6 else None
    done = run("replay", double.url, *SIZES, "--out", tmp_path)
    assert done.exit_code == 1
    assert "HTTP 500: [oops]" in " ".join(done.stdout.split())
    assert len(load_result(tmp_path / "server.json").turns) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "../x"], "--arm is '../x': it names a file"),
        (["--arm", ""], "--arm is ''"),
        (["--sessions", "0"], "--sessions is 0"),
        (["--start-tokens", "5000", "--end-tokens", "4000"], "is above --end-tokens"),
        (["--new-tokens", "0"], "--new-tokens is 0"),
        (["--output-tokens", "0"], "--output-tokens is 0"),
        (["--end-tokens", "200000"], "the server's max_model_len is 100000"),
        (["--model", "big"], "does not serve 'big'"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--system-tokens", "900"], "tools and chat template leave no room"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    double: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run("replay", double.url, *SIZES, *arguments, "--out", tmp_path)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert double.requests == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_at_once(double: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("replay", double.url, *SIZES, "--out", tmp_path / "file" / "below")
    assert isinstance(done.exception, ConfigError)
    assert "cannot make that folder" in str(done.exception)


def test_no_server_is_one_clear_error(tmp_path: Path) -> None:
    done = run("replay", "http://127.0.0.1:9", *SIZES, "--out", tmp_path)
    assert isinstance(done.exception, ServerError)
    assert "start one with `inpage serve MODEL`" in str(done.exception)


def test_report_puts_files_side_by_side_in_the_order_given(make_arm: MakeArm, tmp_path: Path) -> None:
    for arm in ("in-page", "off"):
        save_result(make_arm(arm), tmp_path / f"{arm}.json")
    done = run("report", tmp_path / "in-page.json", tmp_path / "off.json", "--out", tmp_path / "o", "--title", "A & B")
    assert done.exit_code == 0, done.output
    html = (tmp_path / "o" / "report.html").read_text()
    assert "<th>in-page</th><th>off</th>" in html
    assert "<h1>A &amp; B</h1>" in html


def test_report_names_the_file_that_is_no_result(make_arm: MakeArm, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({"arm": 1}))
    done = run("report", tmp_path / "bad.json", "--out", tmp_path)
    assert isinstance(done.exception, ConfigError)
    assert "bad.json" in str(done.exception)


def test_ctrl_c_writes_what_was_measured_and_exits_with_130(double: Any, tmp_path: Path) -> None:
    double.delay_s = 0.15
    code = (
        # A shell that runs the tests in the background lets them, and so this process, ignore Ctrl-C.
        "import signal, sys, typer; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from inpage.replay.command import replay\n"
        "typer.run(replay)"
    )
    arguments = [double.url, *SIZES, "--end-tokens", "20000", "--no-warmup", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    deadline = time.monotonic() + 60
    while len(double.requests) < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    result = load_result(tmp_path / "server.json")
    assert result.note == "interrupted"
    assert 4 <= len(result.turns) < 70
    assert all(turn.error is None for turn in result.turns)
    assert "server: interrupted" in (tmp_path / "report.html").read_text()
