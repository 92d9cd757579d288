"""Predicted durations: fitted from samples, saved, followed online, not led astray by outliers."""

from __future__ import annotations

import random
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from diffusers_continuous.cost_model import Curve, Sample, StepCostModel, fit_curve, r_squared
from diffusers_continuous.errors import ConfigError
from diffusers_continuous.request import Stage
from test_scheduler import request

TRUE = Curve(16.0, 0.02, 3e-6, 0.8)


def samples(curve=TRUE, noise=0.0, seed=0):
    rng = random.Random(seed)
    shapes = [(rows * n, rows * n * n / 2, 2 * rows) for n in (128, 512, 2048, 8192) for rows in (1, 2, 4, 8)]
    return [Sample(*shape, curve.ms(*shape) * rng.uniform(1 - noise, 1 + noise)) for shape in shapes]


def predicted(curve, sample):
    return curve.ms(sample.tokens, sample.pairs, sample.sequences)


def informed(**kinds):
    return StepCostModel(
        {"encode": Curve(10.0), "denoise": Curve(20.0), "decode": Curve(30.0), "pid": Curve(5.0), **kinds}
    )


def test_a_fit_finds_the_curve_that_made_the_samples():
    curve = fit_curve(samples())
    for sample in samples():
        assert predicted(curve, sample) == pytest.approx(sample.ms, rel=1e-6)
    assert astuple(curve) == pytest.approx(astuple(TRUE))
    assert r_squared(curve, samples()) == pytest.approx(1.0)


def test_a_fit_of_noisy_samples_has_no_negative_parts_and_is_nearly_right():
    for seed in range(20):
        curve = fit_curve(samples(noise=0.1, seed=seed))
        assert min(astuple(curve)) >= 0
        assert r_squared(curve, samples(noise=0.1, seed=seed)) >= 0.98


def test_small_work_that_only_launches_kernels_has_a_floor():
    """Published step times of 512 x 512 rows on an H200: one, two and three take nearly the same."""
    times = {1: 167, 2: 183, 3: 186, 4: 240, 8: 425, 16: 832}
    found = [Sample(2112 * rows, 2112**2 / 2 * rows, 2 * rows, ms) for rows, ms in times.items()]
    curve = fit_curve(found)
    assert r_squared(curve, found) >= 0.995
    assert all(abs(predicted(curve, s) / s.ms - 1) <= 0.12 for s in found)


def test_samples_of_one_shape_are_enough_for_a_curve_through_them():
    assert fit_curve([Sample(100, 5000, 2, 7.0)] * 3).ms(100, 5000, 2) == pytest.approx(7.0)


def test_saving_and_loading_keeps_every_prediction(tmp_path):
    model = informed(denoise=TRUE)
    model.source, model.r2 = "a test", {"denoise": 0.99}
    for _ in range(15):
        model.observe("decode", request("a").rows, 60.0)  # twice the curve
    model.save(tmp_path / "cost.json")
    again = StepCostModel.load(tmp_path / "cost.json")
    assert (again.source, again.r2) == ("a test", {"denoise": 0.99})
    for kind in ("encode", "denoise", "decode", "pid"):
        assert again.ms(kind, 500, 5e4, 2) == pytest.approx(model.ms(kind, 500, 5e4, 2))


@pytest.mark.parametrize("content", ["", "[]", '{"curves": {"denoise": {"speed": 3}}}', '{"curves": {"dance": {}}}'])
def test_a_wrong_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"cost\.json"):
        StepCostModel.load(path)
    with pytest.raises(ConfigError, match="nowhere"):
        StepCostModel.load(tmp_path / "nowhere.json")


def test_standalone_and_remaining_time_follow_every_stage():
    model = informed()
    state = request("a", steps=10)
    row = state.rows[0]
    assert model.standalone_ms(state) == model.remaining_ms(row) == 10 + 10 * 20 + 30
    row.step, row.stage, row.text = 4, Stage.DENOISE, SimpleNamespace(num_tokens=8)
    assert model.remaining_ms(row) == 6 * 20 + 30
    row.stage = Stage.DECODE
    assert model.remaining_ms(row) == 30
    assert model.standalone_ms(request("b", steps=3, output_type="latent")) == 10 + 3 * 20


def test_prompts_of_one_length_are_encoded_together():
    rows = request("a", 3).rows
    for row, (prompt, num_tokens) in zip(rows, [("a ring", 7), ("a star", 7), ("a red star", 9)], strict=True):
        row.prompt, row.text = prompt, SimpleNamespace(num_tokens=num_tokens)
    model = informed(encode=Curve(1.0, 0.1, 0.0, 5.0))
    assert model.rows_ms("encode", rows) == pytest.approx(1.0 + 0.1 * (7 + 7 + 9) + 5.0 * 2)


def test_rows_of_one_request_share_its_steps():
    model = informed(denoise=Curve(16.0, 5.0 / 72))
    one, three = request("a", steps=10, output_type="latent"), request("b", 3, steps=10, output_type="latent")
    assert model.standalone_ms(one) == pytest.approx(10 + 10 * 21)
    assert model.standalone_ms(three) == pytest.approx(10 + 10 * 31)


def test_corrections_follow_a_slower_device_and_reach_prices_handed_out_before():
    model = informed()
    rows = request("a").rows
    cost, version = model.cost_of(rows[0]), model.version
    for _ in range(8):
        model.observe("denoise", rows, 50.0)
    assert model.ms("denoise", 72, 0, 1) == cost.step_ms == 50.0
    assert model.version > version
    assert model.ms("decode", 72, 0, 1) == 30.0


def test_outliers_change_nothing():
    model = informed()
    rows = request("a").rows
    for index in range(100):
        model.observe("denoise", rows, 2000.0 if index % 3 == 2 else 20.0)
    assert model.ms("denoise", 72, 0, 1) == 20.0
    assert model.prediction_error() == {"denoise": 0.0}


def test_small_changes_leave_plans_alone():
    model = informed()
    for index in range(50):
        model.observe("denoise", request("a").rows, 20.0 + index % 2 * 0.5)
    assert model.version == 0


def test_without_a_calibration_the_curve_is_learned_from_what_runs():
    rng = random.Random(0)
    model = StepCostModel()
    assert not model.is_informed
    for _ in range(300):
        rows = [row for i in range(rng.randint(1, 8)) for row in request(str(i), tokens=rng.choice((64, 256))).rows]
        tokens = sum(model.cost_of(row).tokens for row in rows)
        ms = 16.0 + 0.02 * tokens + 1.5 * len(rows)
        model.observe("denoise", rows, 10 * ms if rng.random() < 0.05 else ms * rng.uniform(0.97, 1.03))
    assert model.is_informed
    for tokens in (72, 264, 600, 2000):
        assert model.ms("denoise", tokens, 200 * tokens, 4) == pytest.approx(22.0 + 0.02 * tokens, rel=0.12)
    assert model.prediction_error()["denoise"] < 0.05
