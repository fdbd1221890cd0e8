"""In-page servers with one rule broken: a vLLM plugin for tests, switched while the server runs.

`environment(folder)` makes any server that is started with it load this module through `vllm.general_plugins`, from a
`.dist-info` that is written into `folder`. The file `folder/mutant` then names the rule that is broken; empty, nothing
is. The package itself knows nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

SWITCH_FILE = "INPAGE_TEST_MUTANT_FILE"
MUTANTS = {
    "no save": "a step that ends on a boundary leaves its page as it was, though the ledger believes the save",
    "no restore": "a hit starts from whatever its slot holds",
    "no zeroing": "attention blocks are handed out as their last owner left them",
    "no zeroed slot": "a cold request gets its slot as the last owner left it",
    "no hand-back": "finished requests keep their slots",
    "no hand-back of aborted": "only requests that were cut off keep their slots",
    "no hand-back of preempted": "only preempted requests keep their slots",
    "no grid": "prefill chunks end on the configured block, 128, as in stock",
    "no rule 4": "every match counts, written or not",
}


def environment(folder: Path) -> dict[str, str]:
    """What to set for a server that can be broken, nothing broken yet."""
    dist_info = folder / "inpage_broken_server-0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: inpage-broken-server\nVersion: 0\n")
    (dist_info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nbroken = {Path(__file__).stem}:register\n")
    (folder / "mutant").write_text("")
    path = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), SWITCH_FILE: str(folder / "mutant")}


def break_rule(folder: Path, mutant: str) -> None:
    """Break this rule from now on; an empty name mends it."""
    assert mutant in ("", *MUTANTS)
    new = folder / "mutant.new"
    new.write_text(mutant)
    new.replace(folder / "mutant")


def broken(mutant: str) -> bool:
    """Whether this rule is broken now."""
    return Path(os.environ[SWITCH_FILE]).read_text() == mutant


def register() -> None:
    """`vllm.general_plugins`: hang a switch onto each rule, in every process of the server."""
    if getattr(register, "done", False):
        return
    register.done = True  # type: ignore[attr-defined]
    from inpage.engines import cpu
    from inpage.engines.scheduler import SchedulerSide
    from inpage.state.pages import PageStore
    from inpage.state.plan import StepFacts
    from inpage.state.slots import SlotTable

    for mutant, owner, name, instead in (
        ("no save", PageStore, "save", lambda *_: 0),
        ("no restore", PageStore, "restore", lambda *_: 0),
        ("no zeroing", PageStore, "zero_pages", lambda *_: None),
        ("no zeroed slot", PageStore, "zero_slot", lambda *_: None),
        ("no hand-back", SlotTable, "hand_back", lambda *_: []),
        ("no grid", SchedulerSide, "_split", _off_grid),
        ("no rule 4", SchedulerSide, "_get_cached_block", _as_vllm),
        ("no rule 4", SchedulerSide, "_get_computed_blocks", _as_vllm),
    ):
        setattr(owner, name, _switched(mutant, getattr(owner, name), instead))

    facts_of = cpu.step_facts
    update_states = cpu.InPageCPUModelRunner._update_states
    unfinished: set[str] = set()

    def step_facts(*args: Any) -> StepFacts:
        facts = facts_of(*args)
        if broken("no hand-back of aborted"):
            return StepFacts(**{**vars(facts), "finished": set(facts.finished) - unfinished})
        if broken("no hand-back of preempted"):
            return StepFacts(**{**vars(facts), "preempted": (), "resumed": ()})
        return facts

    def note_unfinished(runner: Any, output: Any) -> Any:
        unfinished.clear()
        for request_id in output.finished_req_ids:
            request = runner.requests.get(request_id)
            if request is not None and len(request.output_token_ids) < request.sampling_params.max_tokens:
                unfinished.add(request_id)
        return update_states(runner, output)

    cpu.step_facts = step_facts
    cpu.InPageCPUModelRunner._update_states = note_unfinished  # type: ignore[method-assign]


def _off_grid(side: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    side.scheduler.cache_config.block_size = 128  # what a server's EngineCore finds when it starts
    return original(*args, **kwargs)


def _as_vllm(side: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _switched(mutant: str, right: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return (instead if broken(mutant) else right)(*args, **kwargs)

    return method
