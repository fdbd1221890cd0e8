"""What each gate makes of a server that is right, and of one that is wrong in one way (a double)."""

from __future__ import annotations

import shlex

import pytest
from fake_server import FakeServer

from inpage.errors import ConfigError, ServerError
from inpage.gates.bench import Sizes
from inpage.gates.result import GateReport, GateResult, Verdict
from inpage.gates.run import GATES, chosen_gates, run_gates
from inpage.gates.server import Server

SMALL = Sizes(
    prompts=8, drift_prompts=2, drift_output=6, rounds=3, aborts=9, load_seconds=0.5, preempt_rounds=1, output=4
)


def gates_of(fake: FakeServer, *names: str, sizes: Sizes = SMALL, case: int | None = None) -> GateReport:
    server = Server.connect(fake.url, None, 20.0)
    server.learn_block(None, sizes.vocab, sizes.seed)
    return run_gates([GATES[name] for name in names or GATES], server, sizes, case)


def result_of(fake: FakeServer, name: str, sizes: Sizes = SMALL, case: int | None = None) -> GateResult:
    return gates_of(fake, name, sizes=sizes, case=case).results[0]


def test_a_right_server_passes_every_gate_and_needles_are_judged_when_it_can_read():
    with FakeServer(reads=True) as fake:
        report = gates_of(fake)
    assert {result.gate: result.verdict for result in report.results} == dict.fromkeys(GATES, Verdict.PASS)
    assert (report.block_tokens, report.cached_counts_from) == (16, "usage")
    assert report.exit_status(strict=True) == 0


def test_needles_are_not_judged_when_the_cold_run_does_not_find_them():
    with FakeServer() as fake:
        report = gates_of(fake, "needles", "parity")
    needles = report.results[0]
    assert needles.verdict == Verdict.NOT_JUDGED
    assert "the cold run does not find the needle at depth 0.1 and 2 more" in str(needles.missing)
    assert (report.exit_status(), report.exit_status(strict=True)) == (0, 1)


@pytest.mark.parametrize("gate", ["parity", "drift", "isolation", "edges", "aborts", "mixed", "needles"])
def test_a_hit_from_a_wrong_state_fails(gate):
    with FakeServer(wrong="hits", reads=True) as fake:
        result = result_of(fake, gate)
    assert result.verdict == Verdict.FAIL
    assert result.failure_count >= 1


def test_a_failure_names_its_case_and_the_command_that_repeats_it():
    with FakeServer(wrong="hits") as fake:
        failure = result_of(fake, "parity").failures[1]
        words = shlex.split(failure.repeat)
        assert words[:3] == ["inpage", "gate", fake.url]
        assert failure.repeat.endswith(
            "--only parity --seed 0 --case 1 --block 16 --prompts 8 --output 4 --drift-prompts 2 --drift-output 6 "
            "--rounds 3 --preempt-rounds 1 --aborts 9 --load-seconds 0.5"
        )
        again = result_of(fake, "parity", case=1)
    assert [found.what for found in again.failures] == [failure.what]
    assert "tokens part at output 0" in failure.what


def test_salts_that_do_not_separate_fail_isolation_and_leave_nothing_cold():
    with FakeServer(wrong="salts") as fake:
        report = gates_of(fake, "isolation")
    assert report.results[0].verdict == Verdict.FAIL
    assert "another cache salt hit" in report.results[0].failures[0].what


def test_a_server_without_two_equal_cold_runs_is_not_judged():
    with FakeServer(wrong="unsteady") as fake:
        report = gates_of(fake, "parity", "drift", "edges")
    for result in report.results:
        assert result.verdict == Verdict.NOT_JUDGED
        assert "two cold runs differ by" in str(result.missing)
    assert report.exit_status() == 1


def test_one_token_prompts_that_remember_fail_one_token_only():
    with FakeServer(wrong="stale") as fake:
        report = gates_of(fake, "one-token", "parity", "edges")
    assert [result.verdict for result in report.results] == [Verdict.FAIL, Verdict.PASS, Verdict.PASS]
    assert "got 6 answers in 6 runs" in report.results[0].failures[0].what


def test_a_preempted_request_that_goes_on_from_a_wrong_state_fails_preemption():
    with FakeServer() as fake:
        right = result_of(fake, "preemption")
    with FakeServer(wrong="resumes") as fake:
        wrong = result_of(fake, "preemption")
    assert (right.verdict, wrong.verdict) == (Verdict.PASS, Verdict.FAIL)
    assert right.figures["resumes seen mid-decode"] == 2
    assert "are those of no run from a right state" in wrong.failures[0].what


def test_a_pool_that_cannot_be_filled_is_said():
    with FakeServer(pool=4000) as fake:
        result = result_of(fake, "preemption")
    assert result.verdict == Verdict.NOT_JUDGED
    assert "do not fill the pool of 4,000 blocks" in str(result.missing)


def test_a_server_whose_kernels_depend_on_the_batch_is_judged_only_where_requests_are_alone():
    with FakeServer(batch_noise=True) as fake:
        report = gates_of(fake, "parity", "mixed", "preemption")
    parity, mixed, preemption = report.results
    assert parity.verdict == Verdict.PASS
    assert mixed.verdict == preemption.verdict == Verdict.NOT_JUDGED
    assert "cold runs under load differ from cold runs alone" in str(mixed.missing)
    assert "depend on the batch" in str(preemption.missing)


CHUNKED = ("parity", "drift", "edges")


def test_hits_that_differ_as_cold_runs_with_other_chunks_do_are_a_property_of_the_engine():
    with FakeServer(chunk=2) as fake:
        report = gates_of(fake, *CHUNKED, "isolation")
    verdicts = {result.gate: result.verdict for result in report.results}
    assert verdicts["parity"] == Verdict.ENGINE
    assert Verdict.FAIL not in verdicts.values()
    line = report.results[0].engine
    assert line is not None
    assert "a cold run with other chunk ends gives the hit's answer to the bit" in line
    assert "--max-num-batched-tokens of one block" in line
    assert "\n" not in line
    alone = GateReport(**{**report.model_dump(), "results": [report.results[0]]})
    assert (report.exit_status(strict=True), alone.exit_status()) == (1, 1), "it is no pass"


def test_with_one_block_a_chunk_the_same_server_passes():
    with FakeServer(chunk=1) as fake:
        assert {result.verdict for result in gates_of(fake, *CHUNKED).results} == {Verdict.PASS}


@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
@pytest.mark.parametrize("wrong", ["hits", "slightly", "short hits"])
@pytest.mark.parametrize("gate", CHUNKED)
def test_a_wrong_hit_is_never_called_a_property_of_the_engine(gate, wrong, chunk):
    """With several blocks a chunk two cold runs differ by up to 0.002. "slightly" is off by a thousandth of that, where
    drifts compared by size would excuse it; the others are off by far more or are right answers to another prompt.
    """
    with FakeServer(wrong=wrong, chunk=chunk) as fake:
        result = result_of(fake, gate)
    assert result.verdict == Verdict.FAIL
    assert "two cold runs are equal" in result.failures[0].what


def test_a_wrong_hit_that_drifts_compared_by_size_would_excuse_drifts_less_than_cold_runs():
    with FakeServer(wrong="slightly", chunk=2) as fake:
        prompt = [1] * 65
        server = Server.connect(fake.url, None, 20.0)
        cold = server.generate(prompt, "cold")
        server.generate([1] * 16 + [2] * 48, "parted")
        other_chunks = server.generate(prompt, "parted")
        server.generate(prompt, "fill")
        hit = server.generate(prompt, "fill")
    assert (other_chunks.cached_tokens, hit.cached_tokens) == (None, 64)
    assert other_chunks.drift(cold) > 100 * hit.drift(cold) > 0


def test_numbers_that_are_none_fail_even_where_cold_has_them_too():
    with FakeServer(wrong="nan") as fake:
        result = result_of(fake, "parity")
    assert result.verdict == Verdict.FAIL
    assert "not numbers" in result.failures[0].what


def test_a_server_that_dies_fails_the_gate_and_the_rest_is_not_judged():
    with FakeServer(wrong="dies") as fake:
        report = gates_of(fake, "parity", "drift")
    assert [result.verdict for result in report.results] == [Verdict.FAIL, Verdict.NOT_JUDGED]
    assert "no longer answers since the gate parity" in str(report.results[1].missing)


def test_a_server_that_no_longer_answers_after_a_gate_fails_that_gate():
    """Log probabilities that are no numbers make vLLM answer with an error, which a gate's own prompts may not meet."""
    with FakeServer(wrong="dies", dies_after=34) as fake:
        report = gates_of(fake, "parity", "drift")
    parity, drift = report.results
    assert (parity.figures["equal"], parity.verdict, drift.verdict) == (8, Verdict.FAIL, Verdict.NOT_JUDGED)
    assert "after the gate the server does not answer a short prompt" in parity.failures[0].what


def test_sparse_checkpoints_leave_diverging_prompts_unjudged_unless_they_are_left_out():
    with FakeServer(wrong="sparse") as fake:
        all_shapes = gates_of(fake, "parity")
        fewer = result_of(fake, "parity", Sizes(prompts=6, shapes="single,turns,extension"))
    assert all_shapes.results[0].verdict == Verdict.NOT_JUDGED
    assert "(diverging" in str(all_shapes.results[0].missing)
    assert any("--prefix-cache-retention-interval 0" in note for note in all_shapes.notes)
    assert fewer.verdict == Verdict.PASS


def test_without_caching_nothing_that_needs_hits_is_judged():
    with FakeServer(caching=False) as fake:
        report = gates_of(fake, "parity", "one-token")
    assert [result.verdict for result in report.results] == [Verdict.NOT_JUDGED, Verdict.PASS]
    assert "--enable-prefix-caching" in str(report.results[0].missing)
    assert report.block_tokens is None


def test_cached_tokens_come_from_metrics_where_usage_has_none():
    with FakeServer(counts="metrics") as fake:
        report = gates_of(fake, "parity", "drift")
    assert report.cached_counts_from == "metrics"
    assert [result.verdict for result in report.results] == [Verdict.PASS, Verdict.PASS]


def test_without_any_count_the_gates_say_what_is_missing():
    with FakeServer(counts="none") as fake:
        report = gates_of(fake, "parity", "isolation")
    assert {result.verdict for result in report.results} == {Verdict.NOT_JUDGED}
    assert "--enable-prompt-tokens-details" in str(report.results[0].missing)


@pytest.mark.parametrize("block", [16, 48, 256])
def test_the_block_is_probed_whatever_the_configuration_says(block):
    with FakeServer(block=block, max_model_len=4000) as fake:
        server = Server.connect(fake.url, None, 20.0)
        server.learn_block(None, 250, 0)
    assert server.about.block_tokens == block
    assert server.about.cache_config["block_size"] == "128"


@pytest.mark.parametrize(("block", "unit"), [(48, 16), (256, 64), (384, 128)])
def test_with_hits_inside_a_block_the_block_is_probed_and_edges_cover_marks(block, unit):
    with FakeServer(block=block, unit=unit, max_model_len=4000, pool=400) as fake:
        report = gates_of(fake, "edges", "parity")
        edges = report.results[0]
        assert (report.block_tokens, edges.verdict, report.results[1].verdict) == (block, Verdict.PASS, Verdict.PASS)
        assert edges.figures["prompts that part inside a block"] == 3
        assert result_of(fake, "edges", case=edges.figures["compared"] - 4).figures["hits"] == 2


def test_marks_that_are_never_hit_leave_edges_unjudged():
    with FakeServer(block=48, unit=16, wrong="no marks") as fake:
        edges = result_of(fake, "edges")
    assert edges.verdict == Verdict.NOT_JUDGED
    assert "a prompt of 17 tokens (edge 17) hit 0, not 16" in str(edges.missing)


def test_a_copy_that_harms_its_source_fails_edges():
    with FakeServer(block=48, unit=16, wrong="copies") as fake:
        edges = result_of(fake, "edges")
    assert edges.verdict == Verdict.FAIL
    assert "whose copy parted after 65" in edges.failures[0].what


def test_bad_input_is_refused():
    with FakeServer() as fake:
        with pytest.raises(ConfigError, match="--model other is not served"):
            Server.connect(fake.url, "other", 20.0)
        with pytest.raises(ConfigError, match="the gate parity has the cases 0 to 7"):
            result_of(fake, "parity", case=8)
    with pytest.raises(ServerError, match="does not list its models"):
        Server.connect(fake.url, None, 2.0)
    with pytest.raises(ConfigError, match="--only speed: there are parity"):
        chosen_gates("speed", None)
    with pytest.raises(ConfigError, match="--case names a case of one gate"):
        chosen_gates("aborts", 3)
    with pytest.raises(ConfigError, match="--rounds 0: must be more than zero"):
        Sizes(rounds=0).check()
