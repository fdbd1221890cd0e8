"""What a soak sends reaches every corner, and its helpers tell the truth."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from inpage.cli import app
from inpage.demo.model import make_model
from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.soak.command import BLOCK_TOKENS, BLOCKS, MODEL, SEQUENCES
from inpage.soak.memory import resident_bytes
from inpage.soak.workload import CROWD, STAGES, canaries, requests

BLOCK = 64


def test_the_same_seed_sends_the_same_requests():
    assert list(requests(200, BLOCK, seed=3)) == list(requests(200, BLOCK, seed=3))
    assert list(requests(200, BLOCK, seed=3)) != list(requests(200, BLOCK, seed=4))


def test_prompts_come_in_every_length_and_clients_leave_at_every_stage():
    sent = list(requests(2000, BLOCK, seed=0))
    lengths = [len(request.prompt) for request in sent]
    assert [request.number for request in sent] == list(range(2000))
    assert {1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK} <= set(lengths)
    assert max(lengths) + max(request.output_tokens for request in sent) < 1024
    assert {request.hang_up for request in sent} == {None, *STAGES}
    assert any(len(r.prompt) % BLOCK + r.output_tokens > BLOCK for r in sent)  # a boundary crossed while decoding


def test_the_first_requests_are_a_crowd_that_outgrows_the_pool_while_it_decodes():
    crowd = list(requests(CROWD, BLOCK, seed=0))
    assert list(requests(200, BLOCK, seed=0))[:CROWD] == crowd
    assert len({request.prompt[:BLOCK] for request in crowd}) == CROWD == SEQUENCES
    assert not any(request.hang_up for request in crowd)

    def blocks(tokens: int) -> int:  # of attention, and one for the state of each of three GDN groups
        return -(-tokens // BLOCK) + 3

    assert sum(blocks(len(r.prompt)) for r in crowd) < BLOCKS < sum(blocks(len(r.prompt) + BLOCK) for r in crowd)


def test_prefixes_are_shared_within_a_salt_and_across_salts():
    salts: dict[tuple[int, ...], list[str]] = {}
    for request in requests(2000, BLOCK, seed=0):
        salts.setdefault(request.prompt[:BLOCK], []).append(request.salt)
    shared = [names for prefix, names in salts.items() if len(prefix) == BLOCK and len(names) > 20]
    assert shared
    assert all(len(set(names)) > 1 and len(set(names)) < len(names) for names in shared)


def test_canaries_cover_the_edges_and_say_which_must_hit():
    lengths = {len(canary.prompt): canary.hits for canary in canaries(BLOCK, seed=0)}
    assert lengths == {1: False, 32: False, 64: False, 65: True, 137: True, 337: True}


def test_the_soaked_model_has_the_block_that_the_requests_are_cut_for(tmp_path):
    shape = ModelShape.from_file(make_model(tmp_path, MODEL), ssm_dtype="float32")
    assert Geometry.of(shape, alignment=BLOCK_TOKENS).block_tokens == BLOCK_TOKENS
    assert SEQUENCES * 5 * 4 > BLOCKS  # as many requests of five blocks in four groups do not fit


def test_resident_memory_counts_every_process_of_the_group():
    code = "x = bytearray(64 << 20); print(flush=True); input()"
    group = []
    try:
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=group[0].pid if group else 0,
            )
            group.append(process)
            assert process.stdout is not None
            process.stdout.readline()
        assert os.getpgid(group[1].pid) == group[0].pid
        assert 2 * 64 << 20 < resident_bytes(group[0].pid) < 4 * 64 << 20
    finally:
        for process in group:
            process.communicate(b"\n")
    assert resident_bytes(group[0].pid) == 0


@pytest.mark.parametrize("options", [["--requests", "1"], ["--pauses", "1"], ["--concurrency", "0"]])
def test_settings_that_make_no_soak_are_refused_before_anything_starts(options, tmp_path):
    result = CliRunner().invoke(app, ["soak", "--out", str(tmp_path / "soak"), *options])
    assert isinstance(result.exception, ConfigError)
    assert "at least two pauses" in str(result.exception)
    assert not (tmp_path / "soak").exists()
