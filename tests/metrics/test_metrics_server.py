"""A real server's `/metrics` counts what was done to it, exactly; then a short soak of the same server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from inpage.demo.model import make_model
from inpage.demo.server import RunningServer, running_server
from inpage.gates.client import Completions
from inpage.gates.metrics_text import Metrics
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.metrics.catalogue import METRICS
from inpage.soak.command import BLOCK_TOKENS, BLOCKS, ENVIRONMENT, MODEL, SEQUENCES, server_arguments
from inpage.soak.result import SoakResult, judge
from inpage.soak.runner import Soak

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(str(model), server_arguments(), "in-page", log, ENVIRONMENT) as running:
        yield running


def read(server: RunningServer) -> Metrics:
    return Metrics(httpx.get(f"{server.url}/metrics", timeout=30.0).text)


def prompt(length: int, start: int) -> Sequence[int]:
    return [(start + index * 7) % 250 for index in range(length)]


def test_the_counts_are_exactly_what_the_requests_did(server, model):
    before = read(server)
    counters = [metric.exposed_name for metric in METRICS if metric.kind == "counter"]
    assert {name for name in before.names("inpage_") if name.endswith("_total")} == set(counters)
    assert [before.total(name) for name in counters] == [0.0] * len(counters)

    completions = Completions(server.url, str(model), output_tokens=3)
    long = prompt(200, start=0)
    assert not completions.generate(long, "a").cached_tokens  # cold: checkpoints at 64, 128 and 192
    assert completions.generate(long, "a").cached_tokens == 192  # restored; nothing new to save
    assert not completions.generate(long, "b").cached_tokens  # another salt: cold again, three more
    completions.generate([5], "a")
    completions.generate(prompt(64, start=3), "a")  # exactly a block: too short to hit, but saved
    completions.generate(prompt(60, start=5), "a", output_tokens=8)  # reaches 64 while it decodes: saved
    with httpx.Client() as client:  # the last hand-back follows the answer
        deadline = time.monotonic() + 30
        while (after := Metrics(client.get(f"{server.url}/metrics").text)).total("inpage_hand_backs_total") != 6:
            assert time.monotonic() < deadline, after.total("inpage_hand_backs_total")

    geometry = Geometry.of(ModelShape.from_file(model, ssm_dtype="float32"), alignment=BLOCK_TOKENS)
    saves, restores = 3 + 3 + 1 + 1, 1
    assert {name: after.total(name) for name in counters if not name.endswith("_seconds_total")} == {
        "inpage_saves_total": saves,
        "inpage_restores_total": restores,
        "inpage_fresh_slots_total": 5,
        "inpage_hand_backs_total": 6,
        # 200 tokens and the answer need four blocks, behind a hit one; one token one; the others grow into a second.
        "inpage_zeroed_pages_total": 4 + 1 + 4 + 1 + 2 + 2,
        "inpage_block_copies_total": 0,
        "inpage_copied_bytes_total": (saves + restores) * geometry.state_bytes * geometry.gdn_layers,
        "inpage_refused_hits_total": 0,
        "inpage_deferred_requests_total": 0,
        "inpage_short_prompts_total": 3,
        "inpage_evicted_checkpoint_blocks_total": 0,
        "inpage_attention_only_tokens_total": 0,
        "inpage_cut_chunks_total": 0,
    }
    assert 0 < after.total("inpage_copy_seconds_total") < after.total("inpage_step_seconds_total")
    assert (after.total("inpage_slots_in_use"), after.total("inpage_slots")) == (0, SEQUENCES)
    assert after.total("inpage_pages") == BLOCKS - 1
    assert after.total("inpage_pages", owner="checkpoint") == 3 * saves  # one block in each of three groups
    assert after.total("inpage_restores_total", model_name=str(model), engine="0") == restores


def test_a_short_soak_of_it_finds_nothing_wrong_and_everything_home(server, model):
    result = SoakResult(requests=160, concurrency=16, seed=0, server_arguments=server_arguments())
    Soak(server, str(model), BLOCK_TOKENS, result, pauses=3, resets_every=12).run()
    verdicts = {check.name: (check.verdict, check.figures) for check in judge(result)}
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == dict.fromkeys(verdicts, "passed") | {
        "memory flat": "not judged"
    }, (verdicts, result.errors, result.pauses)
