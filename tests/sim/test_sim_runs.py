"""Seeds and mutants: nothing is wrong with the rules, and every broken rule is noticed."""

from __future__ import annotations

import pytest

from inpage.errors import ConfigError
from inpage.sim.knobs import Knobs, draw, pinned
from inpage.sim.mutants import MUTANTS, find
from inpage.sim.run import knobs_of, run_seed
from inpage.sim.shrink import command_line, shrink

SEEDS = range(1, 13)
STEPS = 700
MUTANT_SEEDS = 20
LUCKY = {"no rule 4": 10, "no rule 4 at marks": 10, "chunk not cut": 8}
"""Where to begin for mutants whose damage is rare; the command begins at 1 and finds them too."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_state_page_or_token_differs_from_a_cold_run(seed: int) -> None:
    result = run_seed(seed, STEPS)
    assert result.failure is None, f"{result.failure}\n{command_line(seed, STEPS, {})}"
    assert result.figures["checks"] > 0


def test_a_resumed_request_of_whole_blocks_is_cut_where_vllm_would_pass_a_boundary() -> None:
    pins = {"force_preempt_rate": "0", "salts": "0", "adapters": "0", "max_num_seqs": "3"}
    result = run_seed(90017, 34, pins)
    assert result.failure is None
    assert result.figures["cut"] >= 1


def test_a_seed_gives_the_same_run_every_time() -> None:
    assert run_seed(3, 300).figures == run_seed(3, 300).figures


def test_the_seeds_reach_every_kind_of_server() -> None:
    drawn = [draw(seed) for seed in range(1, 201)]
    assert {knobs.asynchronous for knobs in drawn} == {False, True}
    assert {knobs.policy for knobs in drawn} == {"fcfs", "priority"}
    assert {knobs.retention for knobs in drawn} >= {None, 0, 1}
    assert {(knobs.budget > knobs.block_tokens) - (knobs.budget < knobs.block_tokens) for knobs in drawn} == {-1, 0, 1}
    assert all(knobs.num_blocks > knobs.blocks_of_longest for knobs in drawn)
    assert not any(min(k.budget, k.chunk_limit or k.budget) < k.block_tokens for k in map(_large, range(1, 201)))


def _large(seed: int) -> Knobs:
    return draw(seed, small_budgets=False)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_notices_a_broken_rule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mutant, first = MUTANTS[name], LUCKY.get(name, 1)
    for seed in range(first, 1 + MUTANT_SEEDS):
        result = run_seed(seed, 3000 if name in LUCKY else 1500, dict(mutant.pins), mutant)
        if result.failure is not None:
            with capsys.disabled():
                print(f"\n  {name}: caught by {result.failure.check}, seed {seed}, step {result.failure.step}", end="")
            return
    pytest.fail(f"{name} ({mutant.rule}) survived {MUTANT_SEEDS} seeds")


def test_a_mutant_leaves_nothing_behind() -> None:
    for name in ("no hand-back at preemption", "one block early"):
        run_seed(1, 60, {}, MUTANTS[name])
    assert run_seed(1, 200).failure is None


def test_a_failure_is_shrunk_to_fewer_knobs_that_still_fail_alike() -> None:
    broken = find("no restore")
    found = run_seed(1, 1500, {}, broken)
    assert found.failure is not None
    steps, pins = shrink(found, {}, lambda steps, pins: run_seed(1, steps, pins, broken))
    again = run_seed(1, steps, pins, broken)
    assert again.failure is not None
    assert again.failure.check == found.failure.check
    assert steps <= found.failure.step
    assert pins
    line = command_line(1, steps, pins, mutant="no restore")
    assert line.startswith(f"inpage simulate --seeds 1 --first-seed 1 --steps {steps} --set ")
    assert line.endswith("--mutant 'no restore'")


def test_what_no_knob_or_mutant_is_gets_refused_with_the_names_there_are() -> None:
    assert pinned(Knobs(), {"retention": "none", "asynchronous": "true", "budget": "7"}).budget == 7
    with pytest.raises(ConfigError, match="'color' is no knob of the simulator; there are abort_rate"):
        pinned(Knobs(), {"color": "red"})
    with pytest.raises(ConfigError, match="'many' is no value for the knob sessions"):
        pinned(Knobs(), {"sessions": "many"})
    with pytest.raises(ConfigError, match="'no such' is no mutant; there are"):
        find("no such")
    assert knobs_of(5, {"policy": "fcfs"}).policy == "fcfs"
