"""The command: table, files, exit status (against a double)."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from fake_server import FakeServer
from typer.testing import CliRunner

from inpage.cli import app
from inpage.errors import ConfigError
from inpage.gates.metrics_text import Metrics
from inpage.gates.result import GateReport


def gate(*arguments: str):
    return CliRunner().invoke(app, ["gate", *arguments])


def test_a_pass_prints_a_table_writes_both_files_and_exits_with_zero(tmp_path):
    with FakeServer() as fake:
        files = ["--json", str(tmp_path / "r.json"), "--junit", str(tmp_path / "deep" / "r.xml")]
        run = gate(fake.url, "--only", "parity,needles", "--prompts", "4", *files)
    assert run.exit_code == 0, run.output
    assert "1 passed, 0 failed, 1 not judged" in run.output
    report = GateReport.model_validate_json((tmp_path / "r.json").read_text())
    assert [result.gate for result in report.results] == ["parity", "needles"]
    assert report.results[0].figures["equal"] == 4
    suite = ET.parse(tmp_path / "deep" / "r.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "1")
    assert suite.find("testcase[@name='needles']/skipped") is not None


def test_a_failure_is_printed_with_its_repeat_command_and_exits_with_one(tmp_path):
    with FakeServer(wrong="hits") as fake:
        run = gate(fake.url, "--only", "parity", "--prompts", "2", "--junit", str(tmp_path / "r.xml"))
    assert run.exit_code == 1
    assert f"repeat: inpage gate {fake.url} --only parity --seed 0 --case 0 --block 16 --prompts 2" in run.output
    failure = ET.parse(tmp_path / "r.xml").getroot().find("testcase/failure")
    assert failure is not None
    assert "--case 0" in str(failure.text)


def test_not_judged_fails_only_when_nothing_passed_or_with_strict():
    with FakeServer() as fake:
        assert gate(fake.url, "--only", "needles").exit_code == 1
        assert gate(fake.url, "--only", "needles,one-token").exit_code == 0
        assert gate(fake.url, "--only", "needles,one-token", "--strict").exit_code == 1


def test_no_server_and_bad_names_are_errors_of_our_own():
    assert isinstance(gate("ftp://nowhere").exception, ConfigError)
    assert isinstance(gate("http://127.0.0.1:9", "--only", "speed").exception, ConfigError)
    run = gate("http://127.0.0.1:9", "--only", "parity")
    assert "does not list its models" in str(run.exception)


def test_the_api_key_is_sent_and_never_printed(tmp_path):
    with FakeServer(wrong="hits") as fake:
        run = gate(
            fake.url, "--only", "one-token,edges", "--api-key", "very-secret", "--json", str(tmp_path / "r.json")
        )
    assert "very-secret" not in run.output + (tmp_path / "r.json").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["seed"] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a{x="1"} 2\na{x="2"} 3.5\n', 5.5),
        ("# HELP a text\na 7e2 1700000000\n", 700.0),
        ("b 1\n", None),
        ('a{x="with \\" and } inside"} 1', 1.0),
        ("a nonsense", None),
    ],
)
def test_prometheus_text_is_read(text, expected):
    assert Metrics(text).total("a") == expected
