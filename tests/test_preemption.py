"""Paused rows through the real engine: what makes way at every step ends with the very same bits."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from diffusers_continuous import RequestStatus
from test_pid_engine import make_decoder

SIZES = ((64, 96), (96, 64), (64, 64))


class FewestStepsFirst:
    """Takes turns: whoever has done a step makes way for everybody who has done fewer."""

    is_preemptive = True
    keeps_deadlines = False

    def key(self, row):
        return (row.step + row.decode_step,)

    def order(self, waiting, running, now):
        return sorted([*waiting, *running], key=self.key)


def run(pipe, calls, at_once):
    """Final latents and pictures of the calls, one after another or taking turns step by step, one row at a time."""
    engine = pipe.init_continuous_batching(max_requests_per_batch=1)
    engine.scheduler._policy = FewestStepsFirst()
    outputs = []
    if at_once:
        ids = [engine.add_request(**call) for call in calls]
        engine.start()
        outputs = [engine.get_result(request_id, timeout=120) for request_id in ids]
    else:
        engine.start()
        outputs = [engine.get_result(engine.add_request(**call), timeout=120) for call in calls]
    num_preemptions = engine.stats().num_preemptions
    engine.stop()
    assert [output.status for output in outputs] == [RequestStatus.FINISHED] * len(calls)
    return outputs, num_preemptions


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_rows_that_make_way_at_every_step_end_with_the_same_bits(make_pipe, name):
    pipe = make_pipe()
    config = pipe.scheduler.config
    pipe.scheduler = (
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
        if name == "unipc"
        else FlowMatchEulerDiscreteScheduler.from_config(copy.deepcopy(config))
    )
    calls = [
        {"prompt": "a red star", "negative_prompt": " ", "height": h, "width": w, "num_inference_steps": 6, "seed": i}
        for i, (h, w) in enumerate(SIZES)
    ]
    alone, num_preemptions = run(pipe, calls, at_once=False)
    assert num_preemptions == 0
    turns, num_preemptions = run(pipe, calls, at_once=True)
    assert num_preemptions >= 12
    for a, b in zip(alone, turns, strict=True):
        assert torch.equal(a.latents, b.latents)


def test_a_decoder_of_many_steps_makes_way_in_the_middle_and_ends_with_the_same_bits(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    calls = [
        {"prompt": "a cat", "height": h, "width": w, "num_inference_steps": 2 + i, "seed": i, "output_type": "pt"}
        for i, (h, w) in enumerate(SIZES)
    ]
    alone, _ = run(pipe, calls, at_once=False)
    turns, _ = run(pipe, calls, at_once=True)
    for a, b in zip(alone, turns, strict=True):
        assert torch.equal(a.latents, b.latents)
        assert torch.equal(a.images, b.images)


def test_the_decoders_steps_really_alternate(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching(max_requests_per_batch=1)
    engine.scheduler._policy = FewestStepsFirst()
    ids = [engine.add_request(prompt="a cat", height=h, width=w, num_inference_steps=2, seed=0) for h, w in SIZES[:2]]
    engine.start()
    assert [engine.get_result(request_id, timeout=120).error for request_id in ids] == [None, None]
    decodes = [record.request_ids[0] for record in engine.stats().recent_steps if record.kind == "decode"]
    assert sum(a != b for a, b in itertools.pairwise(decodes)) >= 4
