"""`scripts/bench_serving.py`: what it makes of known durations."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

from diffusers_continuous.cost_model import Curve, StepCostModel

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
bench = importlib.import_module("bench_serving")


@pytest.fixture
def workload():
    """40 requests of which the stock pipeline takes a second for ten steps and five for fifty."""
    made = bench.Workload("rfc", 40, "poisson", seed=1)
    made.stock_s = [steps / 10 for _, steps in made.kinds]
    return made


def test_sizes_are_an_eighth_of_the_simulators(workload):
    assert set(workload.kinds) == {(128, 10), (128, 50)}
    assert {request.steps for request in workload.requests} == {10, 50}
    assert len({request.prompt for request in workload.requests}) == 40


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_a_load_is_a_part_of_what_the_stock_pipeline_can_serve(workload, load):
    times = workload.arrival_times(load)
    assert sum(workload.stock_s) / (times[-1] - times[0]) == pytest.approx(load)


def test_first_in_first_out_waits_for_everybody_before(workload):
    served = bench.serve_first_in_first_out(workload, load=1e9)  # all come at once
    for number, latency in enumerate(served.latencies_s):
        assert latency == pytest.approx(sum(workload.stock_s[: number + 1]), rel=1e-6)


def test_first_in_first_out_does_not_wait_where_nobody_is_before(workload):
    served = bench.serve_first_in_first_out(workload, load=1e-6)
    assert served.latencies_s == pytest.approx(workload.stock_s)
    kinds = bench.summary(workload, served)["kinds"]
    assert kinds["all"]["attainment_1.5x"] == kinds["128px/50"]["attainment_1.5x"] == 1.0
    assert kinds["all"]["p99_slowdown"] == pytest.approx(1.0)


def test_what_failed_is_late(workload):
    latencies = [2.5 * seconds for seconds in workload.stock_s]
    latencies[3] = latencies[7] = math.inf
    result = bench.summary(workload, bench.Served("x", 1.0, latencies, {}))
    assert result["kinds"]["all"]["attainment_3x"] == pytest.approx(38 / 40)
    assert result["kinds"]["all"]["attainment_2x"] == 0.0
    assert result["kinds"]["all"]["p99_slowdown"] == math.inf
    assert math.isfinite(result["p99_latency_s"])
    json.loads(json.dumps(bench.rounded(result), allow_nan=False))


def test_the_simulated_engine_has_the_same_arrivals_and_deadlines(workload):
    def model(step_ms):
        return StepCostModel({"encode": Curve(), "denoise": Curve(step_ms, 1e-6), "decode": Curve()})

    alone = bench.simulate(workload, 1e-6, "slo", model(step_ms=100.0))
    assert alone.latencies_s == pytest.approx(workload.stock_s, rel=1e-3)
    hopeless = bench.summary(workload, bench.simulate(workload, 1e-6, "slo", model(step_ms=301.0)))
    assert hopeless["kinds"]["all"]["attainment_3x"] == 0.0
