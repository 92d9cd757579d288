"""The pipeline as an object: arguments, results, saving, loading, shared state."""

from __future__ import annotations

import json
import logging
import threading

import numpy as np
import pytest
import torch
from diffusers import (
    AutoPipelineForText2Image,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
)

from conftest import assert_latents_equal, assert_pictures_equal, generator, load_stock
from diffusers_continuous import (
    ContinuousBatchingPipeline,
    EngineStoppedError,
    RequestError,
    UnsupportedModelError,
    embedded,
)
from diffusers_continuous.arguments import check_arguments
from test_equality import run_together

SMALL = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0}


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_every_output_type_is_the_stock_one(pipe, stock, output_type):
    call = {**SMALL, "num_images_per_prompt": 2, "output_type": output_type}
    ours = pipe("a ring", generator=generator(0), **call).images
    theirs = stock("a ring", generator=generator(0), **call).images
    assert type(ours) is type(theirs)
    if output_type == "pil":
        for a, b in zip(ours, theirs, strict=True):
            assert_pictures_equal(a, b)
    else:
        assert ours.shape == theirs.shape
        assert abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-4
    assert isinstance(pipe("a ring", return_dict=False, **call), tuple)


def test_sizes_are_floored_with_the_stock_warning_and_the_default_is_the_models(pipe, stock, caplog):
    sizes = {**SMALL, "height": 75, "width": 100}
    with caplog.at_level(logging.WARNING):
        ours = pipe("a ring", generator=generator(0), **sizes).images[0]
    assert "have to be divisible by 16 but are 75 and 100" in caplog.text
    assert_pictures_equal(ours, stock("a ring", generator=generator(0), **sizes).images[0])
    assert pipe("a ring", num_inference_steps=2).images[0].size == (128, 128)


def test_results_can_be_edited_in_place(pipe):
    images = pipe("a ring", output_type="pt", **SMALL).images
    images.mul_(2)
    assert not images.requires_grad


def test_a_bar_per_call_advances_with_the_steps(make_pipe, capsys):
    pipe = make_pipe()
    pipe.set_progress_bar_config(disable=False)
    pipe("a ring", **SMALL)
    assert "3/3" in capsys.readouterr().err


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "either `prompt` or `prompt_embeds`"),
        ({"prompt": 5}, "string or a non-empty list"),
        ({"prompt": []}, "string or a non-empty list"),
        ({"prompt": ["a", None]}, "string or a non-empty list"),
        ({"prompt": "a", "height": 0}, "height=0 must be at least 16"),
        ({"prompt": "a", "width": -64}, "width=-64 must be at least 16"),
        ({"prompt": "a", "width": 64.0}, "width=64.0 must be a whole number"),
        ({"prompt": "a", "height": 10**6}, "height=1000000, width=64: at most 16777216 pixels"),
        ({"prompt": "a", "num_inference_steps": 0}, "num_inference_steps=0 must be a whole number from 1 to 1000"),
        ({"prompt": "a", "num_inference_steps": 1}, "use at least 2 steps"),
        ({"prompt": "a", "num_images_per_prompt": 0}, "num_images_per_prompt=0"),
        ({"prompt": "a", "num_images_per_prompt": 1001}, "num_images_per_prompt=1001 must be .* from 1 to 1000"),
        ({"prompt": "a", "true_cfg_scale": float("inf")}, "true_cfg_scale=inf"),
        ({"prompt": "a", "true_cfg_scale": "4"}, "true_cfg_scale='4'"),
        ({"prompt": "a", "output_type": "png"}, r"output_type='png' is not known; choose from \['latent'"),
        ({"prompt": "a", "max_sequence_length": 1025}, "max_sequence_length=1025"),
        ({"prompt": "a", "seed": -1}, "seed=-1"),
        ({"prompt": "a", "seed": 1, "generator": torch.Generator()}, "`seed` or a `generator`"),
        ({"prompt": "a", "generator": [torch.Generator()] * 3}, "3 generators for 1 pictures"),
        ({"prompt": "a", "generator": 7}, "`generator` must be a torch.Generator"),
        ({"prompt": "a \ud800"}, r"`prompt` has '\\ud800', half a character, at 2"),
        ({"prompt": ["a", "\udcff"]}, r"`prompt` has '\\udcff', half a character, at 0"),
        ({"prompt": "a", "negative_prompt": "\ud800", "true_cfg_scale": 4.0}, "`negative_prompt` has .* half a"),
        ({"prompt": ["a", "b"], "negative_prompt": ["x"] * 3}, "3 negative prompts for 2 prompts"),
        ({"prompt": "a", "latents": torch.zeros(1, 4, 64)}, r"packed \(1, 16, 64\) tensor"),
        ({"prompt": "a", "latents": torch.full((1, 16, 64), torch.nan)}, "`latents` has non-finite values"),
        ({"prompt_embeds": torch.zeros(1, 4, 77)}, r"\(prompts, tokens, 128\) tensor"),
        ({"prompt_embeds": torch.zeros(1, 4, 128).bfloat16()}, "bfloat16, the transformer computes in torch.float32"),
        ({"prompt": "a", "prompt_embeds": torch.zeros(1, 4, 128)}, "and not both"),
        ({"prompt": "a", "sigmas": [1.0, "x"]}, "does not accept these sigmas"),
        ({"prompt": "a", "sigmas": [1.0, float("nan"), 0.2]}, "`sigmas` has non-finite values"),
        ({"prompt": "a", "sigmas": [1.0, 10**400, 0.2]}, "`sigmas` has non-finite values"),
        ({"prompt": "a", "attention_kwargs": {"scales": 1.0}}, "only {'scale': number} is known"),
        ({"prompt": "a", "callback_on_step_end_tensor_inputs": ["noise"]}, r"but found \['noise'\]"),
        ({"prompt": "a", "callback_on_step_end_tensor_inputs": 3}, "inputs=3 must be a list of names"),
        ({"prompt": "a", "callback_on_step_end": 3}, "not callable"),
        ({"prompt": "a", "request_id": ""}, "request_id=''"),
        ({"prompt": "a", "priority": "high"}, "priority='high'"),
    ],
)
def test_a_bad_argument_names_its_value_and_the_limit(pipe, arguments, text):
    with pytest.raises(RequestError, match=text):
        pipe(**{"height": 64, "width": 64, "num_inference_steps": 3, **arguments})
    assert not pipe._engine.scheduler.has_requests()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_python_does_not_print_is_refused_like_any_other(pipe, sign):
    number = sign * 10**5000
    everywhere = {"height", "width", "num_inference_steps", "num_images_per_prompt", "max_sequence_length", "seed"}
    everywhere |= {"prompt", "negative_prompt", "true_cfg_scale", "deadline_s", "sigmas", "generator", "latents"}
    everywhere |= {"output_type", "request_id", "attention_kwargs", "callback_on_step_end", "early_stop_steps"}
    for name in sorted(everywhere):
        with pytest.raises(RequestError, match=f"{name}.*<int, too long to print>"):
            check_arguments(pipe, **{"prompt": "a", "negative_prompt": "b", name: number})
    with pytest.raises(RequestError, match=r"found <list, too long to print>"):
        check_arguments(pipe, "a", callback_on_step_end_tensor_inputs=[number])
    with pytest.raises(RequestError, match=r"only {'scale': number} is known"):
        check_arguments(pipe, "a", attention_kwargs={"scale": 1.0, number: 1})
    engine = pipe.init_continuous_batching()
    with pytest.raises(RequestError, match="request_id=<int, too long to print> is not known"):
        engine.get_result(number)
    with pytest.raises(RequestError, match="request_id=<int, too long to print> names two inputs"):
        pipe.generate_batch([{"prompt": "x", "request_id": number}, {"prompt": "y", "request_id": number}])


def test_guidance_without_a_negative_prompt_warns_and_runs_unguided(pipe, stock, caplog):
    call = {**SMALL, "true_cfg_scale": 4.0, "output_type": "latent"}
    with caplog.at_level(logging.WARNING):
        ours = pipe("a ring", generator=generator(0), **call).images
    assert "classifier-free guidance is not enabled" in caplog.text
    assert_latents_equal(ours, stock("a ring", generator=generator(0), **call).images)


def test_autocast_is_refused_with_advice(pipe):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RequestError, match="dtype="):
        pipe("a ring", **SMALL)


def test_a_guidance_distilled_transformer_is_refused_when_building(components):
    broken = QwenImageTransformer2DModel(
        num_layers=1,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=False,
    )
    broken.register_to_config(guidance_embeds=True)
    with pytest.raises(UnsupportedModelError, match="guidance_embeds=True"):
        ContinuousBatchingPipeline(**{**components, "transformer": broken})


def test_a_very_long_prompt_is_cut_with_a_warning_and_the_others_run(pipe, stock, caplog):
    long = "a red star on a blue background " * 200
    calls = [{"prompt": long, **SMALL}, {"prompt": "a ring", **SMALL}]
    with caplog.at_level(logging.WARNING):
        ours = run_together(
            pipe, [{**c, "generator": generator(i), "output_type": "latent"} for i, c in enumerate(calls)]
        )
    assert "max_sequence_length=512" in caplog.text
    for i, call in enumerate(calls):
        assert_latents_equal(ours[i], stock(**call, generator=generator(i), output_type="latent").images)


# ---------------------------------------------------------------------- saving and loading


def test_a_saved_folder_loads_everywhere_and_draws_the_same(tmp_path, make_pipe):
    pipe = make_pipe()
    expected = pipe("a ring", seed=1, output_type="latent", **SMALL).images
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "QwenImagePipeline"
    assert index["transformer"] == ["diffusers", "QwenImageTransformer2DModel"]
    for loader in (DiffusionPipeline, AutoPipelineForText2Image, QwenImagePipeline):
        assert type(loader.from_pretrained(tmp_path)) is QwenImagePipeline
    ours = ContinuousBatchingPipeline.from_pretrained(tmp_path)
    ours.set_progress_bar_config(disable=True)
    assert ours.default_sample_size == 16
    assert_latents_equal(ours("a ring", seed=1, output_type="latent", **SMALL).images, expected)


def test_the_embedded_model_loads_plainly_with_its_own_size():
    pipe = ContinuousBatchingPipeline.from_pretrained(embedded.embedded_model_path())
    pipe.set_progress_bar_config(disable=True)
    assert pipe.text_encoder.dtype == pipe.transformer.dtype == torch.float32
    assert pipe("a ring", num_inference_steps=2, true_cfg_scale=1.0).images[0].size == (128, 128)


# ---------------------------------------------------------------------- noise schedulers


NOISE_SCHEDULERS = {
    "euler": lambda config: FlowMatchEulerDiscreteScheduler.from_config(config),
    "euler, static shift": lambda config: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda config: UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0, solver_order=2
    ),
}


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
def test_noise_schedulers_step_as_in_stock_each_request_with_its_own_copy(make_pipe, name):
    stock, pipe = load_stock(), make_pipe(fresh=True)
    for either in (stock, pipe):
        either.scheduler = NOISE_SCHEDULERS[name](either.scheduler.config)
    calls = [
        {"prompt": "a ring", "height": h, "width": w, "num_inference_steps": steps, "negative_prompt": " "}
        for h, w, steps in ((64, 64, 9), (96, 128, 5), (64, 64, 6))
    ]
    ours = run_together(
        pipe,
        [{**c, "generator": generator(i), "output_type": "latent"} for i, c in enumerate(calls)],
        starts=[0, 2, 4],
    )
    for i, call in enumerate(calls):
        expected = stock(**call, generator=generator(i), output_type="latent").images
        assert_latents_equal(ours[i], expected)
    assert pipe.scheduler.step_index is None  # nobody stepped the shared one


def test_a_stochastic_noise_scheduler_draws_from_its_own_request(make_pipe):
    pipe = make_pipe(fresh=True)
    pipe.scheduler = FlowMatchLCMScheduler(shift=2.0)
    call = {**SMALL, "num_inference_steps": 6, "output_type": "latent"}
    alone = [pipe("a ring", generator=generator(i), num_images_per_prompt=2, **call).images for i in range(3)]
    crowd = run_together(
        pipe, [{"prompt": "a ring", "generator": generator(i), "num_images_per_prompt": 2, **call} for i in range(3)]
    )
    for a, b in zip(alone, crowd, strict=True):
        assert_latents_equal(a, b)
    assert not torch.allclose(alone[0][0], alone[0][1], atol=1e-2)
    assert_latents_equal(pipe("a ring", seed=3, **call).images, pipe("a ring", seed=3, **call).images)


def test_a_new_noise_scheduler_holds_for_later_requests_only(make_pipe):
    stock, pipe = load_stock(), make_pipe(fresh=True)
    engine = pipe.init_continuous_batching()
    first = engine.add_request(prompt="a ring", seed=1, output_type="latent", **SMALL)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    second = engine.add_request(prompt="a ring", seed=1, output_type="latent", **SMALL)
    engine.start()
    before = stock("a ring", generator=generator(1), output_type="latent", **SMALL).images
    assert_latents_equal(engine.get_result(first).images, before)
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    after = stock("a ring", generator=generator(1), output_type="latent", **SMALL).images
    assert_latents_equal(engine.get_result(second).images, after)


# ---------------------------------------------------------------------- shared state


def test_an_exchanged_component_waits_for_what_runs_and_holds_for_what_waits(make_pipe):
    pipe, other = make_pipe(fresh=True), load_stock()
    with torch.no_grad():
        other.transformer.proj_out.weight.mul_(0.5)
    stock_before, stock_after = load_stock(), QwenImagePipeline(**other.components)
    stock_after.set_progress_bar_config(disable=True)
    started = threading.Event()

    def callback(view, step, timestep, kwargs):
        started.set()
        return {}

    results = {}
    thread = threading.Thread(
        target=lambda: results.update(
            a=pipe(
                "a ring",
                generator=generator(0),
                output_type="latent",
                callback_on_step_end=callback,
                **{**SMALL, "num_inference_steps": 8},
            ).images
        )
    )
    thread.start()
    assert started.wait(30)
    pipe.transformer = other.transformer
    after = pipe("a ring", generator=generator(1), output_type="latent", **SMALL).images
    thread.join(30)
    expected = stock_before(
        "a ring", generator=generator(0), output_type="latent", **{**SMALL, "num_inference_steps": 8}
    )
    assert_latents_equal(results["a"], expected.images)
    assert_latents_equal(after, stock_after("a ring", generator=generator(1), output_type="latent", **SMALL).images)


def test_an_engine_that_a_call_made_can_be_had_and_exchanged(pipe):
    assert pipe.engine is None
    with pytest.raises(AttributeError):
        pipe.engine = 3
    pipe("a ring", **SMALL)
    assert pipe.engine.stats().num_by_status == {"finished": 1}
    with pytest.raises(EngineStoppedError, match=r"pipe\.engine\.stop\(\)"):
        pipe.init_continuous_batching(max_requests_per_batch=2)
    pipe.engine.stop()
    engine = pipe.init_continuous_batching(max_requests_per_batch=2)
    pipe("a ring", **SMALL)
    assert pipe.engine is engine
    assert engine.is_running()


def test_two_threads_on_one_pipeline(pipe, stock):
    """What crashes the stock pipeline: two threads, one noise scheduler."""
    calls = [{"prompt": "a ring", "height": 64, "width": 64, "num_inference_steps": s} for s in (5, 7)]
    ours = run_together(pipe, [{**c, "generator": generator(0), "output_type": "latent"} for c in calls])
    for mine, call in zip(ours, calls, strict=True):
        assert_latents_equal(mine, stock(**call, generator=generator(0), output_type="latent").images)
