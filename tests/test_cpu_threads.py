"""Who waits for pictures keeps no threads that the engine would have to share the cores with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from diffusers_continuous.cpu_threads import _pause, release_helpers
from test_engine import SMALL

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or _pause() is None, reason="this PyTorch computes without GNU's OpenMP"
)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def num_threads() -> int:
    return len(os.listdir(Path("/proc/self/task")))


def compute() -> torch.Tensor:
    return torch.linspace(0, 1, 2_000_000).exp_()


def test_helpers_go_and_come_back_when_they_are_needed(three_threads):
    release_helpers()
    alone = num_threads()
    expected = compute()
    assert num_threads() == alone + 2
    release_helpers()
    assert num_threads() == alone
    assert torch.equal(compute(), expected)


def test_a_caller_keeps_no_helpers_while_it_waits(pipe, three_threads):
    engine = pipe.init_continuous_batching()
    compute()
    with_helpers = num_threads()
    engine.add_request(prompt="a ring", **SMALL)  # not started: nothing else changes
    assert num_threads() == with_helpers - 2
