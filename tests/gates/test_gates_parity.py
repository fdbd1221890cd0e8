"""The parity gate judges by equality, and a run that never hit proves nothing."""

from __future__ import annotations

import pytest

from inpage.gates.parity import SHAPES, Case, Comparison, Generation, Parity, make_cases, run_parity

CASE = Case("single", (1, 2), (1, 2))


def generation(*logprobs: float, cached: int | None = 256, tokens: str = "ab") -> Generation:
    tops = tuple((("a", value), ("b", -3.0)) for value in logprobs)
    return Generation(tuple(tokens), tops, cached)


def parity(hit: Generation, cold: Generation) -> Parity:
    return Parity([Comparison(CASE, cold, hit)])


def test_equal_tokens_and_logprobs_after_a_hit_are_exact():
    run = parity(generation(-0.5, -0.25), generation(-0.5, -0.25, cached=0))
    assert (run.exact, run.hits, run.equal, run.worst_drift) == (True, 1, 1, 0.0)


def test_the_last_bit_of_one_logprob_is_enough_to_fail():
    run = parity(generation(-0.5, -0.25), generation(-0.5, -0.25000000000000006, cached=0))
    assert not run.exact
    assert run.worst_drift == pytest.approx(5.6e-17, rel=0.1)


def test_another_token_fails_and_drift_is_not_counted_behind_it():
    run = parity(generation(-0.5, -9.0, tokens="ax"), generation(-0.5, -0.25, cached=0))
    assert not run.exact
    assert parity(generation(-0.5, -9.0, tokens="xb"), generation(-0.5, -0.25)).worst_drift == 0.0


@pytest.mark.parametrize("cached", [0, None])
def test_a_run_that_never_hit_is_not_exact(cached):
    run = parity(generation(-0.5, cached=cached), generation(-0.5, cached=0))
    assert (run.exact, run.hits) == (False, 0)


def test_no_cases_are_not_exact():
    assert not Parity().exact


def test_cases_come_in_all_shapes_and_every_prompt_can_hit():
    cases = make_cases(32, block_tokens=256, longest_tokens=1200, vocab=250)
    assert {case.shape for case in cases} == set(SHAPES)
    for case in cases:
        shared = next(
            (i for i, (a, b) in enumerate(zip(case.fill, case.prompt, strict=False)) if a != b), len(case.fill)
        )
        assert shared > 256 or (case.shape == "single" and shared == len(case.prompt) > 256)
        assert max(case.prompt) < 250
    assert cases == make_cases(32, block_tokens=256, longest_tokens=1200, vocab=250)


def test_each_case_runs_cold_under_a_salt_of_its_own_then_fills_then_hits():
    seen: list[tuple[int, str]] = []

    class Recorder:
        def generate(self, prompt, salt):
            seen.append((len(prompt), salt))
            return generation(-0.5)

    cases = [Case("turns", (1,) * 5, (1,) * 9)]
    run_parity(Recorder(), cases, unrelated=[7] * 3)
    (cold, salt_cold), (fill, salt), (other, salt_other), (hit, salt_hit) = seen
    assert (cold, fill, other, hit) == (9, 5, 3, 9)
    assert salt == salt_hit
    assert len({salt, salt_cold, salt_other}) == 3
