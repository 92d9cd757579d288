"""`callback_on_step_end`: in the caller's thread, over its own rows, as the stock pipeline would call it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from conftest import assert_latents_equal, generator
from diffusers_continuous import RequestError
from test_equality import run_together

CALL = {"height": 64, "width": 96, "num_inference_steps": 5, "negative_prompt": " ", "output_type": "latent"}


def test_it_sees_what_the_stock_callback_sees_in_its_own_thread(pipe, stock):
    def recorder(seen):
        def callback(view, step, timestep, kwargs):
            seen.append((step, float(timestep), kwargs["latents"].clone(), kwargs["prompt_embeds"].clone()))
            seen_threads.add(threading.get_ident())
            assert view.num_timesteps == 5
            assert view.guidance_scale is None
            assert float(view.current_timestep) == float(timestep)
            return {}

        return callback

    seen_threads, ours, theirs = set(), [], []
    call = {**CALL, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"], "num_images_per_prompt": 2}
    pipe("a red star", generator=generator(0), callback_on_step_end=recorder(ours), **call)
    assert seen_threads == {threading.get_ident()}
    stock("a red star", generator=generator(0), callback_on_step_end=recorder(theirs), **call)
    assert len(ours) == len(theirs) == 5
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine[:2] == expected[:2]
        assert_latents_equal(mine[2], expected[2])
        assert_latents_equal(mine[3], expected[3])


def test_returned_latents_and_embeddings_are_honoured(pipe, stock):
    def callback(view, step, timestep, kwargs):
        return {"latents": kwargs["latents"] * 0.9, "prompt_embeds": kwargs["prompt_embeds"] * 1.1}

    call = {
        **CALL,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
        "callback_on_step_end": callback,
    }
    expected = stock("a red star", generator=generator(0), **call).images
    assert_latents_equal(pipe("a red star", generator=generator(0), **call).images, expected)


def test_changing_the_noise_scheduler_in_a_callback_changes_this_request_for_all_its_rows(pipe, stock):
    def callback(view, step, timestep, kwargs):
        if step == 1:
            view.scheduler.sigmas[3:-1] *= 0.5
        return {}

    call = {**CALL, "num_images_per_prompt": 2, "callback_on_step_end": callback}
    expected = stock("a red star", generator=generator(0), **call).images
    assert_latents_equal(pipe("a red star", generator=generator(0), **call).images, expected)


def test_interrupt_finishes_only_its_own_request_with_the_latents_it_has(pipe, stock):
    def interrupting(view, step, timestep, kwargs):
        view._interrupt = step == 1
        return kwargs

    calls = [
        {**CALL, "prompt": "a ring", "generator": generator(0), "callback_on_step_end": interrupting},
        {**CALL, "prompt": "a star", "generator": generator(1)},
    ]
    ours = run_together(pipe, calls)
    calls[0]["generator"], calls[1]["generator"] = generator(0), generator(1)
    for mine, call in zip(ours, calls, strict=True):
        assert_latents_equal(mine, stock(**call).images)
    assert pipe._engine.stats().num_by_status == {"finished": 2}


def test_an_exception_comes_back_from_that_call_and_ends_it_alone(pipe, stock):
    def raising(view, step, timestep, kwargs):
        raise LookupError("mine")

    calls = [
        {**CALL, "prompt": "a ring", "generator": generator(0), "callback_on_step_end": raising},
        {**CALL, "prompt": "a star", "generator": generator(1)},
    ]
    error, latents = run_together(pipe, calls)
    assert isinstance(error, LookupError)
    assert_latents_equal(latents, stock("a star", generator=generator(1), **CALL).images)


def test_nobody_waits_for_a_slow_callback(pipe):
    others_done = threading.Event()

    def slow(view, step, timestep, kwargs):
        assert others_done.wait(30)  # the others finish while this gang sits out
        return {}

    slow_thread = threading.Thread(
        target=lambda: pipe("a ring", **{**CALL, "num_inference_steps": 2}, callback_on_step_end=slow)
    )
    slow_thread.start()
    pipe("a star", **CALL)
    others_done.set()
    slow_thread.join(30)
    assert not slow_thread.is_alive()


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (torch.zeros(1, 3, 64), r"latents of \(1, 3, 64\), expected \(1, 24, 64\)"),
        (torch.full((1, 24, 64), float("nan")), "non-finite"),
        ("nonsense", "latents of str"),
    ],
)
def test_unusable_returned_latents_are_an_error(pipe, returned, text):
    with pytest.raises(RequestError, match=text):
        pipe("a ring", callback_on_step_end=lambda *_: {"latents": returned}, **CALL)


def test_the_view_reads_through_locks_models_and_keeps_others_out(pipe):
    def callback(view, step, timestep, kwargs):
        assert view.transformer.config.num_layers == 6
        latents = torch.zeros(1, 16, 1, 8, 8)
        assert view.vae.decode(latents, return_dict=False)[0].shape == (1, 3, 1, 64, 64)
        with pytest.raises(AttributeError, match="cannot be set"):
            view.vae.use_tiling = True
        with pytest.raises(RuntimeError, match="inside callback_on_step_end"):
            pipe.to("cpu")
        return {}

    pipe("a ring", callback_on_step_end=callback, **{**CALL, "num_inference_steps": 2})
    assert not hasattr(pipe, "_interrupt")  # nothing of a request lands on the shared pipeline


def test_in_asyncio_it_runs_in_an_executor(pipe, stock):
    threads = set()

    def callback(view, step, timestep, kwargs):
        threads.add(threading.current_thread())
        return {"latents": kwargs["latents"] * 0.9}

    async def main():
        return await pipe.agenerate("a ring", generator=generator(0), callback_on_step_end=callback, **CALL)

    images = asyncio.run(main()).images
    assert threading.current_thread() not in threads
    expected = stock("a ring", generator=generator(0), callback_on_step_end=callback, **CALL).images
    assert_latents_equal(images, expected)
