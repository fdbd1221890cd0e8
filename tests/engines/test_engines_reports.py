"""Cases that others reported of vLLM, on real servers over HTTP: what hits, to the token, and what explains it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from inpage.demo.server import RunningServer, running_server
from inpage.doctor import running
from inpage.doctor.finding import Finding
from inpage.gates.client import Completions
from inpage.gates.server import Server

pytestmark = pytest.mark.engine

BLOCK = 256
SEQUENCES = 8
ROOMY = 2000
VOCAB = 250


def arguments(budget: int) -> list[str]:
    return [
        "--enforce-eager",
        *("--max-model-len", "4096"),
        *("--max-num-seqs", str(SEQUENCES)),
        *("--max-num-batched-tokens", str(budget)),
        *("--num-gpu-blocks-override", str(ROOMY)),
        *("--mamba-ssm-cache-dtype", "float32"),
        "--enable-prompt-tokens-details",
    ]


@pytest.fixture(scope="module")
def wide(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A token budget far above every prompt: a cold prompt leaves one checkpoint, at its last boundary."""
    log = tmp_path_factory.mktemp("wide") / "log"
    with running_server(str(model), arguments(8192), "in-page", log, {"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def narrow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A block a chunk, as `inpage serve` has it: a checkpoint at every boundary."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    with running_server(str(model), arguments(384), "in-page", log, {"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
        yield server


def words(length: int, *seed: object) -> list[int]:
    rng = Random("/".join(map(str, seed)))
    return [rng.randrange(VOCAB) for _ in range(length)]


def cached(server: RunningServer, model: Path, prompt: list[int], salt: str) -> int | None:
    return Completions(server.url, str(model), output_tokens=2).generate(prompt, salt).cached_tokens


def diagnosis(server: RunningServer, starts: int) -> dict[str, Finding]:
    """What the doctor says once the server has counted so many cold starts."""
    known = Server.connect(server.url, None, 30)
    deadline = time.monotonic() + 30
    while known.metrics().total("inpage_hand_backs_total") != starts:
        assert time.monotonic() < deadline, known.metrics().total("inpage_hand_backs_total")
        time.sleep(0.1)
    return {one.topic: one for one in running.examine(known)}


def test_51250_and_52527_no_hits_are_explained_with_the_numbers(wide, model):
    """The first requests of their server: nothing has hit yet."""
    short = words(200, "short")
    assert [cached(wide, model, short, "s") for _ in range(3)] == [0, 0, 0]
    found = diagnosis(wide, starts=3)
    assert found["hits"].text == "0.0% of 600 prompt tokens came from the cache"
    assert found["short prompts"].text.startswith("3 of 3 requests had a prompt of one block")
    assert "shortest prompt that can hit 257" in wide.log.read_text()

    shared = words(1600, "shared")
    assert cached(wide, model, shared + words(600, 0), "s") == 0
    # Attention finds 1,536 tokens; the only checkpoint is at 2,048. The second leaves one at 1,536, the third hits it.
    assert cached(wide, model, shared + words(600, 1), "s") == 0
    found = diagnosis(wide, starts=5)
    assert found["no checkpoint"].text.startswith(
        "1,536 of 5,000 prompt tokens had their attention blocks in the cache"
    )
    assert "--max-num-batched-tokens" in str(found["no checkpoint"].change)
    assert cached(wide, model, shared + words(600, 2), "s") == 1536
    known = Server.connect(wide.url, None, 30)
    assert known.metrics().total("inpage_attention_only_tokens_total") == 1536


def test_42317_later_turns_hit_one_at_a_time_with_a_budget_far_above_the_prompt(wide, model):
    conversation = words(2800, "conversation")
    turns = [cached(wide, model, conversation[:length], "turns") for length in (700, 1400, 2100, 2800)]
    assert turns == [0, 512, 1280, 2048]


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_53595_seven_blocks_and_a_half_hit_from_the_second_time_on(name, model, request):
    server: RunningServer = request.getfixturevalue(name)
    prompt = words(7 * BLOCK + BLOCK // 2, "half")
    assert [cached(server, model, prompt, "half") for _ in range(3)] == [0, 7 * BLOCK, 7 * BLOCK]


@pytest.mark.parametrize(("shared", "own", "hit"), [(1600, 600, 1536), (1500, 700, 1280)])
def test_45238_of_64_requests_with_a_shared_prefix_all_but_the_first_hit_its_last_boundary(
    narrow, model, shared, own, hit
):
    prefix, salt = words(shared, "prefix", shared), f"{shared}"
    prompts = [prefix + words(own, shared, index) for index in range(64)]
    assert cached(narrow, model, prompts[0], salt) == 0
    with ThreadPoolExecutor(SEQUENCES) as threads:
        rest = list(threads.map(lambda prompt: cached(narrow, model, prompt, salt), prompts[1:]))
    assert rest == [hit] * 63
