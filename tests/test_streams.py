"""Streams, asyncio, batches: other ways to wait for the same pictures."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from conftest import assert_latents_equal, assert_pictures_equal, generator
from diffusers_continuous import RequestCancelledError, RequestError, RequestStatus
from test_engine import Gate

CALL = {"height": 64, "width": 64, "num_inference_steps": 4, "negative_prompt": " "}


def wait_until_idle(engine):
    with engine.exclusive():
        pass


def test_a_stream_shows_steps_and_previews_and_ends_with_the_picture(pipe, stock):
    outputs = list(pipe.stream("a red star on a blue background", generator=generator(0), **CALL))
    assert outputs[-1].finished
    assert outputs[-1].step == outputs[-1].num_steps == 4
    assert outputs[-1].preview is None
    expected = stock("a red star on a blue background", generator=generator(0), **CALL).images[0]
    assert_pictures_equal(outputs[-1].images[0], expected)
    for out in outputs[:-1]:
        (preview,) = out.preview
        assert isinstance(preview, Image.Image)
        assert preview.size == (8, 8)


def test_the_last_preview_resembles_the_picture_and_never_decodes(pipe):
    stream = pipe.stream(
        "a red star on a blue background", seed=1, height=128, width=128, negative_prompt=" ", num_inference_steps=8
    )
    engine = pipe._engine
    gate = Gate(engine, at_step=8)
    previews, final = [], None
    vae, decode = pipe.vae, pipe.vae.decode
    vae.decode = lambda *_, **__: pytest.fail("a preview decoded")
    try:
        for out in stream:
            if out.finished:
                final = out.images[0]
            else:
                previews.append(out.preview[0])
                gate.opened.set() if gate.reached.is_set() else None
    finally:
        vae.decode = decode
    small = np.asarray(final.resize((16, 16), Image.Resampling.BOX)).astype(float)
    assert np.abs(np.asarray(previews[-1]).astype(float) - small).mean() < 40


def test_a_preview_does_not_wait_for_the_step_that_is_running(pipe):
    stream = pipe.stream("a red star on a blue background", seed=1, **CALL)
    output = next(stream)
    assert output.preview  # fitted to the VAE now
    with ThreadPoolExecutor(1) as other, pipe._engine.runner.lock:  # a step holds it
        assert other.submit(lambda: output.preview).result(timeout=20)
    stream.close()


def test_a_stream_validates_at_the_call(pipe):
    with pytest.raises(RequestError, match="height=-3"):
        pipe.stream("a ring", height=-3)
    with pytest.raises(RequestError, match=r"argument='num_inference_step' is not known.*'num_inference_steps'\?"):
        pipe.stream("a ring", num_inference_step=3)


@pytest.mark.parametrize("how", ["close", "garbage collection", "with"])
def test_leaving_a_stream_cancels_its_request(pipe, how):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    stream = pipe.stream("a ring", **CALL)
    assert gate.reached.wait(30)
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    gate.opened.set()
    wait_until_idle(engine)
    assert engine.stats().num_by_status == {"cancelled": 1}


def test_a_cancelled_call_raises_and_a_cancelled_stream_tells(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    stream = pipe.stream("a ring", request_id="streamed", **CALL)
    raised = []

    def call():
        try:
            pipe("a ring", request_id="called", **CALL)
        except RequestCancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    assert gate.reached.wait(30)
    thread.start()
    while not engine.cancel_request("called"):
        threading.Event().wait(0.001)
    engine.cancel_request("streamed")
    gate.opened.set()
    thread.join(30)
    assert len(raised) == 1
    assert [out.status for out in stream][-1] is RequestStatus.CANCELLED


def test_keyboard_interrupt_in_one_caller_cancels_only_its_request(pipe, stock):
    engine = pipe.init_continuous_batching()
    other = pipe.stream("a star", generator=generator(1), output_type="latent", **CALL)

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe("a ring", callback_on_step_end=interrupted, **CALL)
    latents = list(other)[-1].images
    assert_latents_equal(latents, stock("a star", generator=generator(1), output_type="latent", **CALL).images)
    wait_until_idle(engine)
    assert engine.stats().num_by_status == {"failed": 1, "finished": 1}


def test_many_tasks_of_one_asyncio_loop_share_the_batch(pipe, stock):
    async def main():
        return await asyncio.gather(
            *(
                pipe.agenerate(f"a {w}", generator=generator(i), output_type="latent", **CALL)
                for i, w in enumerate(("ring", "star", "cross"))
            )
        )

    for i, (result, word) in enumerate(zip(asyncio.run(main()), ("ring", "star", "cross"), strict=True)):
        expected = stock(f"a {word}", generator=generator(i), output_type="latent", **CALL).images
        assert_latents_equal(result.images, expected)
    assert pipe._engine.stats().mean_rows_per_step > 1.5


def test_an_async_stream_ends_with_the_picture_and_cancels_when_left(pipe):
    async def watch():
        steps = []
        async for out in pipe.astream("a ring", **CALL):
            steps.append(out.step)
            last = out
        return steps, last

    async def leave():
        stream = pipe.astream("a ring", **{**CALL, "num_inference_steps": 200})
        async for _ in stream:
            break
        await stream.aclose()

    steps, last = asyncio.run(watch())
    assert steps == sorted(steps)
    assert last.status is RequestStatus.FINISHED
    asyncio.run(leave())
    wait_until_idle(pipe._engine)
    assert pipe._engine.stats().num_by_status == {"finished": 1, "cancelled": 1}


def test_cancelling_an_asyncio_task_cancels_its_request(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)

    async def main():
        task = asyncio.create_task(pipe.agenerate("a ring", **CALL))
        await asyncio.get_running_loop().run_in_executor(None, gate.reached.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gate.opened.set()
    wait_until_idle(engine)
    assert engine.stats().num_by_status == {"cancelled": 1}


def test_generate_batch_keeps_input_order_and_carries_each_error(pipe, stock):
    outputs = pipe.generate_batch(
        [
            {"prompt": "a ring", "seed": 0, "num_inference_steps": 6},
            {"prompt": "a star", "height": 7, "request_id": "bad"},
            {"prompt": "a cross", "seed": 2, "num_images_per_prompt": 2, "request_id": "named"},
        ],
        **{**CALL, "output_type": "latent"},
    )
    first, bad, named = outputs.values()
    assert list(outputs)[1:] == ["bad", "named"]
    assert isinstance(bad.error, RequestError)
    assert "height=7" in str(bad.error)
    assert named.seeds == [2, 3]
    call = {**CALL, "output_type": "latent", "num_inference_steps": 6}
    assert_latents_equal(first.images, stock("a ring", generator=generator(0), **call).images)
    assert named.images.shape == (2, 16, 64)
