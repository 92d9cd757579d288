"""Deadlines through the real engine: who overtakes whom, what is told about it, what is refused."""

from __future__ import annotations

import re

import pytest

from diffusers_continuous import DeadlineError, QueueFullError, RequestError, RequestStatus
from diffusers_continuous.cost_model import Curve, StepCostModel
from test_engine import SMALL, Gate

LONG, SHORT = {**SMALL, "num_inference_steps": 12}, {**SMALL, "num_inference_steps": 2}


@pytest.fixture
def calibration(tmp_path):
    """A second for every step, nothing for the rest: far from the truth, and known."""
    path = tmp_path / "cost.json"
    StepCostModel({"encode": Curve(), "denoise": Curve(1e3), "decode": Curve()}).save(path)
    return str(path)


@pytest.mark.parametrize("scheduler_type", ["edf", "least_slack", "slo"])
def test_a_short_request_with_an_early_deadline_overtakes_a_running_one(make_pipe, scheduler_type):
    pipe = make_pipe(max_requests_per_batch=1, scheduler_type=scheduler_type)
    engine = pipe._engine
    gate = Gate(engine, at_step=3)
    engine.start()
    long = engine.add_request(prompt="a star", deadline_s=1000, **LONG)
    assert gate.reached.wait(30)
    short = engine.add_request(prompt="a ring", deadline_s=30, **SHORT)
    gate.opened.set()
    first, second = engine.get_result(short, timeout=60), engine.get_result(long, timeout=60)
    assert first.metrics.finish_s < second.metrics.finish_s
    assert second.metrics.deadline_s == second.metrics.arrival_s + 1000
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_on_time) == (1, 2)
    assert stats.prediction_error["denoise"] >= 0


def test_position_and_eta_can_be_asked_for_at_any_time(make_pipe, calibration):
    pipe = make_pipe(max_requests_per_batch=1, scheduler_type="slo", calibration=calibration)
    engine = pipe._engine
    ids = [engine.add_request(prompt="a star", deadline_s=d, **SHORT) for d in (1000, 50)]
    assert [engine.position(request_id) for request_id in ids] == [2, 1]
    assert [engine.eta_s(request_id) for request_id in ids] == pytest.approx([4.0, 2.0], abs=0.1)
    engine.start()
    for request_id in ids:
        assert engine.get_result(request_id, timeout=60).status is RequestStatus.FINISHED
        assert (engine.position(request_id), engine.eta_s(request_id)) == (None, None)


def test_no_eta_is_told_while_it_would_be_a_guess(make_pipe):
    engine = make_pipe().init_continuous_batching()
    first = engine.add_request(prompt="a star", **SHORT)
    assert (engine.position(first), engine.eta_s(first)) == (1, None)
    engine.start()
    engine.get_result(first, timeout=60)
    picture = {**SHORT, "output_type": "pil"}
    for prompt, is_known in (("a ring", False), ("a cross", False), ("a heart", False), ("a square", True)):
        with engine.pause():
            request_id = engine.add_request(prompt=prompt, **picture)
            assert (engine.eta_s(request_id) is not None) == is_known
        engine.get_result(request_id, timeout=60)


def test_what_cannot_be_done_in_time_fails_at_once_and_alone(make_pipe, calibration):
    pipe = make_pipe(scheduler_type="slo", on_hopeless="fail", calibration=calibration)
    with pytest.raises(DeadlineError, match=r"12\.\d s after its arrival at the earliest; its deadline is 3\.0 s"):
        pipe("a star", deadline_s=3, **LONG)
    assert pipe("a ring", deadline_s=30, **SHORT).images.shape == (1, 16, 64)
    pipe._engine.stop()  # with nothing left, although the last thing was a failure


def test_a_full_queue_says_how_long_it_will_be_full(make_pipe, calibration):
    pipe = make_pipe(max_queue_size=2, max_requests_per_batch=1, calibration=calibration)
    engine = pipe._engine
    for _ in range(2):
        engine.add_request(prompt="a star", **SHORT)
    with pytest.raises(QueueFullError, match=re.escape("there will be room in about 2.0 s")):
        engine.add_request(prompt="a star", **SHORT)


@pytest.mark.parametrize(
    "deadline_s", [0, -1.0, float("inf"), float("nan"), pytest.param(10**400, id="huge"), True, "soon"]
)
def test_a_deadline_is_a_positive_number_of_seconds(pipe, deadline_s):
    with pytest.raises(RequestError, match="deadline_s="):
        pipe("a star", deadline_s=deadline_s, **SHORT)


def test_components_are_not_changed_while_a_paused_request_is_half_done(make_pipe):
    pipe = make_pipe(max_requests_per_batch=1, scheduler_type="edf")
    engine = pipe._engine
    gate = Gate(engine, at_step=3)
    engine.start()
    long = engine.add_request(prompt="a star", deadline_s=1000, **LONG)
    assert gate.reached.wait(30)
    short = engine.add_request(prompt="a ring", deadline_s=30, **SHORT)
    gate.opened.set()
    engine.get_result(short, timeout=60)
    with engine.exclusive():
        assert engine.get_result(long, timeout=0) is not None  # it was finished first
