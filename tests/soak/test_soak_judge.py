"""A soak's verdict: a leak, a lost slot, a wrong canary or a request without an end each make it fail."""

from __future__ import annotations

import pytest

from inpage.soak.result import FLAT_WITHIN, MemorySample, Pause, SoakResult, judge, memory_growth

REQUESTS = 4000
MIB = 2**20


def memory(growth: float = 0.0, first_quarter: int = 500) -> list[MemorySample]:
    """Samples of a server that fills its caches in the first quarter, then grows by so much over the rest."""
    samples = [MemorySample(requests=n, resident_bytes=first_quarter * MIB) for n in range(0, 1000, 50)]
    for n in range(1000, REQUESTS + 1, 50):
        samples.append(MemorySample(requests=n, resident_bytes=round(900 * MIB * (1 + growth * (n - 1000) / 3000))))
    return samples


def soaked(**changes: object) -> SoakResult:
    """A soak in which all went well, but for the changes."""
    pauses = [
        Pause(requests=2000, slots_in_use=0.0, asked=12, hits=3),
        Pause(requests=4000, slots_in_use=0.0, reset=True, asked=12, hits=3),
    ]
    result = SoakResult(
        requests=REQUESTS,
        concurrency=8,
        seed=0,
        server_arguments=[],
        wall_s=100.0,
        finished=3400,
        aborted={"sent": 200, "waiting": 200, "answering": 200},
        resets_while_running=5,
        preemptions_by_pool=30.0,
        pauses=pauses,
        memory=memory(),
        metrics={"inpage_restores_total": 3000.0, "inpage_fresh_slots_total": 900.0, "inpage_hand_backs_total": 3900.0},
    )
    return result.model_copy(update=changes)


def failed(result: SoakResult) -> list[str]:
    return [check.name for check in judge(result) if check.verdict == "failed"]


def pauses_with(**changes: object) -> list[Pause]:
    good, last = soaked().pauses
    return [good, last.model_copy(update=changes)]


def test_a_soak_in_which_all_went_well_passes():
    assert [check.verdict for check in judge(soaked())] == ["passed"] * 7


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"pauses": pauses_with(wrong=["129 tokens, 128 cached: 1e-07"])}, "0 wrong"),
        ({"pauses": pauses_with(missed=["129 tokens"])}, "0 wrong"),
        ({"pauses": [Pause(requests=4000, slots_in_use=0.0, reset=True, asked=12, hits=0)]}, "0 wrong"),
        ({"pauses": pauses_with(slots_in_use=1.0)}, "all slots home"),
        ({"pauses": pauses_with(slots_in_use=None)}, "all slots home"),
        (
            {"metrics": {"inpage_restores_total": 3000, "inpage_fresh_slots_total": 900, "inpage_hand_backs_total": 1}},
            "all slots home",
        ),
        ({"metrics": {}}, "all slots home"),
        ({"memory": memory(growth=0.08)}, "memory flat"),
        ({"memory": memory()[:30]}, "memory flat"),
        ({"finished": 3399}, "every request ended"),
        ({"errors": ["request 7: HTTP 500"]}, "every request ended"),
        ({"aborted": {"sent": 300, "waiting": 300}}, "aborted at every stage"),
        ({"preemptions_by_pool": 0.0}, "the pool was too small at times"),
        ({"resets_while_running": 0}, "the cache was reset, idle and running"),
        ({"pauses": pauses_with(reset=False)}, "the cache was reset, idle and running"),
    ],
)
def test_each_thing_that_went_wrong_fails_the_check_of_its_name_and_no_other(changes, check):
    assert failed(soaked(**changes)) == [check]


def test_memory_that_fills_up_in_the_first_quarter_is_flat_and_a_steady_leak_is_not():
    assert memory_growth(memory(first_quarter=100), REQUESTS) == 0.0
    growth = memory_growth(memory(growth=0.2), REQUESTS)
    assert growth is not None
    assert growth > FLAT_WITHIN
    assert "memory flat" in failed(soaked(memory=memory(growth=0.2)))


def test_memory_of_a_short_soak_is_not_judged_and_says_so():
    short = soaked(requests=100, finished=85, aborted={"sent": 5, "waiting": 5, "answering": 5})
    check = judge(short)[-1]
    assert (check.name, check.verdict) == ("memory flat", "not judged")
    assert "2,000 are needed" in check.figures


def test_a_result_survives_its_json():
    assert SoakResult.model_validate_json(soaked().model_dump_json()) == soaked()
