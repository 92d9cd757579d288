"""PiD inside the engine: a row is what the decoder makes of it alone, and nobody waits longer than one of its steps."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from conftest import assert_latents_equal, assert_pictures_equal, generator
from diffusers_continuous import ContinuousBatchingPipeline, RequestError, StepFailedError
from diffusers_continuous.errors import ConfigError, UnsupportedModelError
from diffusers_continuous.memory.host_swap import PagedTensors
from diffusers_continuous.pid import PiDDecoder, PiDScheduler, PiDTransformer2DModel
from diffusers_continuous.pid.scheduling import DISTILLED_TIMES
from test_awkward_moments import in_thread
from test_engine import Gate
from test_pid import tiny_gemma, tiny_tokenizer

CONFIG = {
    "hidden_size": 32,
    "num_groups": 2,
    "patch_depth": 3,
    "pixel_hidden_size": 8,
    "pixel_attn_hidden_size": 16,
    "pixel_num_groups": 2,
    "txt_embed_dim": 24,
    "txt_max_length": 8,
    "lq_hidden_dim": 16,
    "lq_num_res_blocks": 1,
}
# A crowd's row against the decoder alone: the same sums in other batches, through four steps.
MAX_ABS = 1e-4


def make_decoder(scheduler: PiDScheduler | None = None, **config: Any) -> PiDDecoder:
    """Random weights, large enough that every input matters."""
    torch.manual_seed(0)
    net = PiDTransformer2DModel(**{**CONFIG, **config})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2 if parameter.ndim == 2 else 1)
    gemma = copy.deepcopy(tiny_gemma())
    decoder = PiDDecoder(net.eval(), scheduler or PiDScheduler(), gemma, tiny_tokenizer(), "User Prompt : ")
    decoder.set_progress_bar_config(disable=True)
    return decoder


def decode_alone(pipe: ContinuousBatchingPipeline, output: Any, prompt: str, row: int = 0, **size: int) -> torch.Tensor:
    """What the decoder makes of a request's reported latents, noise level and seed: (1, 3, height, width)."""
    return pipe.decoder(
        latents=output.latents[row : row + 1],
        prompt=prompt,
        sigma=output.final_sigmas[row],
        generator=generator(output.decode_seeds[row]),
        output_type="pt",
        **size,
    ).images


def test_every_row_of_a_crowd_is_what_the_decoder_makes_of_it_alone(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    requests = [
        {"prompt": "a red cat", "height": 32, "width": 48, "num_inference_steps": 5, "early_stop_steps": 2},
        {"prompt": "a cat", "height": 32, "width": 48, "num_inference_steps": 4, "num_images_per_prompt": 2},
        {"prompt": "red", "height": 48, "width": 32, "num_inference_steps": 6, "early_stop_at": 5},
        {"prompt": "a", "height": 32, "width": 48, "num_inference_steps": 4, "decoder": "vae"},
        {"prompt": "", "height": 16, "width": 16, "num_inference_steps": 3, "negative_prompt": " "},
    ]
    outputs = list(
        pipe.generate_batch([{**r, "seed": i, "output_type": "pt"} for i, r in enumerate(requests)]).values()
    )
    assert [output.error for output in outputs] == [None] * len(outputs)
    for request, output in zip(requests, outputs, strict=True):
        size = {"height": request["height"], "width": request["width"]}
        if request.get("decoder") == "vae":
            assert output.images.shape[2:] == (32, 48)
            assert output.decode_seeds == [None]
            continue
        assert output.images.shape[2:] == (4 * size["height"], 4 * size["width"])
        for row in range(len(output.images)):
            alone = decode_alone(pipe, output, request["prompt"], row, **size)
            assert (alone[0] - output.images[row]).abs().max() <= MAX_ABS
    assert not torch.allclose(outputs[1].images[0], outputs[1].images[1], atol=0.05)


def test_stopping_early_takes_the_noise_level_of_the_requests_own_schedule(make_pipe, stock):
    pipe = make_pipe(decoder=make_decoder())
    seen: dict[int, Any] = {}

    def record(pipeline: QwenImagePipeline, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen[step + 1] = (kwargs["latents"].clone(), float(pipeline.scheduler.sigmas[step + 1]))
        return {}

    shared = {"prompt": "a red star on a blue background", "num_inference_steps": 6, "output_type": "latent"}
    for size in (64, 128):
        stock(**shared, height=size, width=size, generator=generator(1), callback_on_step_end=record)
        ours = [{"early_stop_steps": 2}, {"early_stop_at": 5}, {}]
        inputs = [{**shared, "height": size, "width": size, "generator": generator(1), **extra} for extra in ours]
        for done, output in zip((4, 5, 6), pipe.generate_batch(inputs).values(), strict=True):
            assert (output.step, output.num_steps) == (done, done)
            assert_latents_equal(output.latents, seen[done][0])
            assert output.final_sigmas == [seen[done][1]]


def test_no_denoising_step_waits_longer_than_one_decoding_step(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching(scheduler_type="fcfs")
    engine.start()
    with engine.pause():
        decoding = [
            engine.add_request(prompt="a cat", height=size, width=64, num_inference_steps=2, seed=1)
            for size in (64, 96)
        ]
        denoising = [
            engine.add_request(prompt="a", height=64, width=64, num_inference_steps=12, seed=i, decoder="vae")
            for i in range(4)
        ]
    outputs = {request_id: engine.get_result(request_id) for request_id in (*decoding, *denoising)}
    assert all(output.error is None for output in outputs.values())
    records = [record for record in engine.stats().recent_steps if record.kind != "encode"]
    last = max(i for i, record in enumerate(records) if record.kind == "denoise")
    kinds = [record.kind for record in records[: last + 1]]
    assert kinds.count("decode") == 8  # two sizes, four steps each, all while the others denoise
    assert "decode,decode" not in ",".join(kinds)
    alone = [pipe("a", height=64, width=64, num_inference_steps=12, seed=i, decoder="vae") for i in range(4)]
    for request_id, solo in zip(denoising, alone, strict=True):
        assert_pictures_equal(outputs[request_id].images[0], solo.images[0])


def test_decodes_of_one_size_share_their_steps_and_a_newcomer_joins_them(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching()
    engine.start()
    with engine.pause():
        ids = [
            engine.add_request(
                prompt="a cat", height=64, width=64, num_inference_steps=steps, seed=steps, output_type="pt"
            )
            for steps in (2, 2, 3)
        ]
    outputs = [engine.get_result(request_id) for request_id in ids]
    rows = [len(record.request_ids) for record in engine.stats().recent_steps if record.kind == "decode"]
    assert rows[:2] == [2, 3]
    for output in outputs:
        alone = decode_alone(pipe, output, "a cat", height=64, width=64)
        assert (output.images - alone).abs().max() <= MAX_ABS


def test_a_row_that_turns_non_finite_fails_alone_and_says_where(make_pipe, monkeypatch):
    pipe = make_pipe(decoder=make_decoder())
    net, forward = pipe.decoder.transformer, PiDTransformer2DModel.forward
    sick = pipe.decoder.encode_prompt("red")

    def spoil(self: Any, sample: Any, timestep: Any, embeds: Any, *args: Any, **kwargs: Any) -> Any:
        (velocity,) = forward(self, sample, timestep, embeds, *args, **kwargs)
        for row in range(len(velocity)):
            if timestep[row] < 700 and torch.equal(embeds[row], sick[0]):
                velocity[row, 0, 0, 0] = float("nan")
        return (velocity,)

    monkeypatch.setattr(PiDTransformer2DModel, "forward", spoil)
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 3, "output_type": "pt"}
    inputs = [{"prompt": prompt, **call} for prompt in ("red", "a cat")]
    failed, good = pipe.generate_batch(inputs).values()
    assert isinstance(failed.error, StepFailedError)
    assert "step 3 of 4 of its decode stage" in str(failed.error)
    monkeypatch.undo()
    assert net is pipe.decoder.transformer
    alone = decode_alone(pipe, good, "a cat", height=64, width=64)
    assert (good.images - alone).abs().max() <= MAX_ABS


@pytest.mark.parametrize("algorithm", ["sde", "dpmsolver++"])
def test_a_step_that_ran_out_of_memory_halfway_is_taken_again_from_where_it_was(make_pipe, monkeypatch, algorithm):
    monkeypatch.setattr("diffusers_continuous.pid.pipeline.UNDISTILLED_STEPS", 6)
    scheduler = PiDScheduler(algorithm_type=algorithm, t_list=None if algorithm == "dpmsolver++" else DISTILLED_TIMES)
    pipe = make_pipe(decoder=make_decoder(scheduler))
    step, calls = PiDScheduler.step, []

    def fail_once_in_a_while(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)  # after the noise was drawn and the solver has moved
        calls.append(1)
        if len(calls) in (2, 7):  # of three rows, then of two
            raise torch.OutOfMemoryError("no room")
        return result

    call = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    inputs = [{"prompt": prompt, "seed": i, **call} for i, prompt in enumerate(("red", "a cat", "a"))]
    engine = pipe.init_continuous_batching()
    ids = [engine.add_request(**arguments) for arguments in inputs]
    with monkeypatch.context() as patch:
        patch.setattr(PiDScheduler, "step", fail_once_in_a_while)
        engine.start()
        outputs = [engine.get_result(request_id, timeout=120) for request_id in ids]
    assert engine.stats().num_batch_retries == 2
    for request, output in zip(inputs, outputs, strict=True):
        assert output.error is None
        alone = decode_alone(pipe, output, request["prompt"], height=32, width=32)
        assert (output.images - alone).abs().max() <= MAX_ABS


def test_a_row_without_memory_for_its_new_picture_steps_again_with_the_same_noise(make_pipe, monkeypatch):
    pipe = make_pipe(decoder=make_decoder())
    put, calls = PagedTensors.put, []

    def fail_once(self: PagedTensors, name: str, tensor: torch.Tensor) -> None:
        calls.append(name)
        if name == "sample" and calls.count(name) == 5:  # of the second of three; the noise of each was before
            raise torch.OutOfMemoryError("no room")
        put(self, name, tensor)

    call = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    inputs = [{"prompt": prompt, "seed": i, **call} for i, prompt in enumerate(("red", "a cat", "a"))]
    with monkeypatch.context() as patch:
        patch.setattr(PagedTensors, "put", fail_once)
        outputs = list(pipe.generate_batch(inputs).values())
    assert pipe.engine.stats().num_batch_retries == 1
    for request, output in zip(inputs, outputs, strict=True):
        assert output.error is None
        alone = decode_alone(pipe, output, request["prompt"], height=32, width=32)
        assert (output.images - alone).abs().max() <= MAX_ABS


@pytest.mark.parametrize("algorithm", ["sde", "dpmsolver++"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_whose_result_finds_no_memory_draws_the_same_noise_again(make_pipe, monkeypatch, algorithm, num_rows):
    monkeypatch.setattr("diffusers_continuous.pid.pipeline.UNDISTILLED_STEPS", 4)
    times = DISTILLED_TIMES if algorithm == "sde" else None
    pipe = make_pipe(decoder=make_decoder(PiDScheduler(algorithm_type=algorithm, t_list=times)))
    call = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    inputs = [{**call, "seed": seed} for seed in range(num_rows)]
    expected = [output.images for output in pipe.generate_batch(inputs).values()]
    put, clamp, num_puts, refused = PagedTensors.put, torch.Tensor.clamp, [], []

    def refuse() -> None:
        refused.append(1)
        raise torch.OutOfMemoryError("no room")

    def put_without_room(self: Any, name: str, tensor: Any) -> None:
        num_puts.extend([1] * (name == "sample"))
        if name == "sample" and len(num_puts) == 2 * num_rows:  # the last row's first step
            refuse()
        put(self, name, tensor)

    def clamp_without_room(self: Any, *args: Any) -> Any:
        if args == (-1, 1) and len(refused) == 1:
            refuse()
        return clamp(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PagedTensors, "put", put_without_room)
        patch.setattr(torch.Tensor, "clamp", clamp_without_room)
        outputs = list(pipe.generate_batch(inputs).values())
    assert len(refused) == 2
    for output, images in zip(outputs, expected, strict=True):
        assert output.error is None
        assert (output.images - images).abs().max() <= (MAX_ABS if num_rows > 1 else 0)


def test_what_other_pictures_keep_goes_before_a_row_fails_for_want_of_memory(make_pipe, monkeypatch):
    pipe = make_pipe(decoder=make_decoder(), scheduler_type="fcfs")
    engine = pipe._engine
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    calls = [{"prompt": "a cat", "seed": 1, **call}, {"prompt": "red", "seed": 2, "decoder": "vae", **call}]
    expected = [output.images for output in make_pipe(decoder=make_decoder()).generate_batch(calls).values()]
    long, short = (pipe._make_request(**arguments) for arguments in calls)
    engine.submit(long)
    while long.rows[0].decode_step < 1:
        engine._step()
    encode, kept = engine.runner._model.prepare_encode, []

    def no_room_beside_heads(rows: Any) -> None:
        kept.append(long.rows[0].decode_state.features.heads is not None)
        if kept[-1]:
            raise torch.OutOfMemoryError("no room")
        encode(rows)

    monkeypatch.setattr(engine.runner._model, "prepare_encode", no_room_beside_heads)
    engine.submit(short)
    while not (long.status.is_ending and short.status.is_ending):
        engine._step()
    assert kept == [True, False]
    for state, images in zip((long, short), expected, strict=True):
        assert state.error is None
        assert torch.equal(state.future.result(0).images, images)


def test_pictures_that_are_done_stay_when_memory_runs_out_behind_their_last_step(make_pipe, monkeypatch):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching()
    post_decode, sizes = engine.runner._model.post_decode, []

    def full_at_the_end(rows: Any) -> None:
        post_decode(rows)
        sizes.append(len(rows))
        if len(rows) > 1 and all(row.image is not None for row in rows):
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine.runner._model, "post_decode", full_at_the_end)
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    result = pipe("a cat", num_images_per_prompt=2, generator=generator(1), **call)
    assert len(result.images) == 2
    assert sizes[-3:] == [2, 1, 1]


@pytest.mark.parametrize("decoder", ["vae", "pid"])
def test_no_more_is_decoded_together_than_there_has_been_memory_for(make_pipe, monkeypatch, decoder):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching()
    post_decode, sizes = engine.runner._model.post_decode, []

    def small_memory(rows: Any) -> None:
        sizes.append(sum(row.num_image_tokens for row in rows))
        if sizes[-1] > 10:
            raise torch.OutOfMemoryError("no room")
        post_decode(rows)

    call = {"num_inference_steps": 2, "num_images_per_prompt": 5, "decoder": decoder, "output_type": "pt"}
    small, large = ({**call, "height": side, "width": side} for side in (32, 64))
    alone = pipe("a cat", seed=1, **small).images
    assert engine.stats().max_decode_tokens == {}
    monkeypatch.setattr(engine.runner._model, "post_decode", small_memory)
    assert (pipe("a cat", seed=1, **small).images - alone).abs().max() <= MAX_ABS
    assert sizes[:4] == [20, 12, 8, 4]
    assert max(sizes[4:]) == 8
    assert engine.stats().num_batch_retries == 2
    assert engine.stats().max_decode_tokens == {decoder: 8}
    sizes.clear()
    pipe("a cat", seed=1, **small)
    assert max(sizes) == 8
    with pytest.raises(StepFailedError, match="no room"):
        pipe("a cat", seed=1, **large)
    assert engine.stats().max_decode_tokens == {decoder: 8}  # one alone was too much, not several


def test_what_a_row_kept_goes_when_its_request_ends(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    call = {"prompt": "a cat", "height": 64, "width": 64, "num_inference_steps": 2}
    for is_cancelled in (False, True):
        stream = pipe.stream(**call)
        if is_cancelled:
            stream.close()
        else:
            *_, last = stream
            assert last.images is not None
        pipe(**call)  # by now the loop has been between two steps
        for row in stream._state.rows:
            kept = (row.image, row.decode_state, row.noise_pred, row.text, row.step_cache)
            assert kept == (None, None, None, None, {})


def test_a_decode_can_be_cancelled_between_two_steps(make_pipe, monkeypatch):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching()
    forward, started, calls = PiDTransformer2DModel.forward, threading.Event(), []

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            assert engine.cancel_request("mine")
            started.set()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(PiDTransformer2DModel, "forward", count)
    engine.start()
    engine.add_request(prompt="a", height=64, width=64, num_inference_steps=2, request_id="mine")
    assert engine.get_result("mine").status == "cancelled"
    assert started.wait(10)
    assert pipe("a", height=64, width=64, num_inference_steps=2).images[0].size == (256, 256)
    assert len(calls) == 2 + 4


def test_a_callback_that_stops_a_call_leaves_its_noise_to_the_decoder(make_pipe):
    pipe = make_pipe(decoder=make_decoder())

    def stop(view: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        view._interrupt = step == 1
        return {}

    call = {"prompt": "a cat", "height": 64, "width": 64, "num_inference_steps": 5, "seed": 3}
    stopped = pipe(**call, callback_on_step_end=stop).images[0]
    early = pipe(**call, early_stop_at=2).images[0]
    assert np.array_equal(np.asarray(stopped), np.asarray(early))


def test_a_byte_limit_changes_no_picture_and_refuses_what_cannot_fit(make_pipe):
    decoder = make_decoder()
    call = {"prompt": "a cat", "height": 128, "width": 128, "num_inference_steps": 2, "seed": 3, "output_type": "pt"}
    whole = make_pipe(decoder=decoder)(**call).images
    need = decoder.transformer.estimate_decode_bytes(512, 512)
    divided = make_pipe(decoder=decoder, max_decode_bytes=need // 2)(**call).images
    assert (whole - divided).abs().max() <= 2e-5
    with pytest.raises(RequestError, match="bytes"):
        make_pipe(decoder=decoder, max_decode_bytes=1000)(**call)


def test_an_undistilled_decoder_is_guided(make_pipe):
    teacher = make_decoder(PiDScheduler(algorithm_type="dpmsolver++", t_list=None, shift=6.0))
    pipe = make_pipe(decoder=teacher)
    (output,) = pipe.generate_batch(
        [{"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 2, "seed": 3, "output_type": "pt"}]
    ).values()
    alone = decode_alone(pipe, output, "a cat", height=32, width=32)
    assert (alone - output.images).abs().max() <= MAX_ABS


def test_bfloat16_decodes_in_a_crowd_as_alone(make_pipe):
    pipe = make_pipe(dtype=torch.bfloat16, decoder=make_decoder().to(torch.bfloat16))
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "pt"}
    inputs = [{"prompt": prompt, "seed": i, **call} for i, prompt in enumerate(("red", "a cat", "a"))]
    for request, output in zip(inputs, pipe.generate_batch(inputs).values(), strict=True):
        alone = decode_alone(pipe, output, request["prompt"], height=64, width=64)
        assert (output.images - alone).abs().mean() <= 2e-3  # bfloat16 products in other batches


def test_what_was_encoded_stays_good_without_the_text_encoder(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "seed": 1}
    before = pipe("a cat", **call).images[0]
    pipe.decoder.free_text_encoder()
    assert np.array_equal(np.asarray(pipe("a cat", **call).images[0]), np.asarray(before))
    with pytest.raises(RequestError, match="does not remember the prompt 'red'"):
        pipe("red", **call)


def test_latents_need_no_caption(make_pipe, stock):
    pipe = make_pipe(decoder=make_decoder())
    embeds, mask = stock.encode_prompt("a cat")
    call = {"prompt_embeds": embeds, "prompt_embeds_mask": mask, "height": 32, "width": 32, "num_inference_steps": 2}
    call["output_type"] = "latent"
    ours, theirs = (p(**call, generator=generator(0)).images for p in (pipe, stock))
    assert_latents_equal(ours, theirs)


def test_a_decoder_that_requests_wait_for_stays(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching(max_requests_per_batch=1)
    engine.start()
    errors: list[BaseException] = []

    def take_away() -> None:
        try:
            pipe.decoder = None
        except RuntimeError as error:
            errors.append(error)

    with engine.pause():
        ids = [engine.add_request(prompt="a", height=32, width=32, num_inference_steps=2) for _ in range(2)]
        thread = threading.Thread(target=take_away)
        thread.start()
    thread.join()
    assert "wait for PiDDecoder" in str(errors[0])
    assert all(engine.get_result(request_id).error is None for request_id in ids)


def test_a_decoder_that_requests_of_a_draining_engine_wait_for_stays(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    engine = pipe.init_continuous_batching(max_requests_per_batch=1)
    gate = Gate(engine, at_step=2)
    ids = [engine.add_request(prompt="a", height=32, width=32, num_inference_steps=2) for _ in range(2)]
    engine.start()
    assert gate.reached.wait(30)
    engine.stop(block=False)
    assert pipe.init_continuous_batching() is not engine
    taking_away = in_thread(setattr, pipe, "decoder", None)
    while not engine.scheduler.is_holding:
        threading.Event().wait(0.001)
    gate.opened.set()
    assert "wait for PiDDecoder" in str(taking_away.outcome())
    assert [engine.get_result(request_id, timeout=30).error for request_id in ids] == [None, None]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"sigmas": [1.8, 1.5, 1.2, 0.5], "early_stop_steps": 2}, "PiD takes 0 to 1"),
        ({"decoder": object()}, "names 'pid' or 'vae'"),
        ({"decoder": "pidd"}, "did you mean 'pid'"),
        ({"decoder": "vae", "early_stop_steps": 1}, "decoder='pid'"),
        ({"early_stop_steps": 4}, "from 0 to 3"),
        ({"early_stop_steps": -1}, "from 0 to 3"),
        ({"early_stop_at": 5}, "from 1 to 4"),
        ({"early_stop_at": 2, "early_stop_steps": 1}, "not both"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 4, 128)}, "pass `prompt`"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(make_pipe, call, text):
    pipe = make_pipe(decoder=make_decoder())
    source = generator(0)
    before = source.get_state()
    with pytest.raises(RequestError, match=text):
        pipe(**{"prompt": "a", "height": 64, "width": 64, "num_inference_steps": 4, "generator": source, **call})
    if "sigmas" not in call:
        assert torch.equal(source.get_state(), before)


def test_a_pipeline_without_a_decoder_says_so(pipe):
    with pytest.raises(RequestError, match="needs a PiDDecoder"):
        pipe("a", height=64, width=64, num_inference_steps=2, decoder="pid")


def test_a_decoder_of_other_latents_is_refused(make_pipe):
    with pytest.raises(UnsupportedModelError, match="4 channels"):
        make_pipe(decoder=make_decoder(lq_latent_channels=4))
    with pytest.raises(UnsupportedModelError, match="must be a PiDDecoder, not 'pid'"):
        make_pipe(decoder="pid")
    with pytest.raises(RequestError, match="the decoder is on meta"):
        make_pipe(decoder=make_decoder().to("meta"))("a", height=32, width=32, num_inference_steps=2)


def test_sizes_outside_the_training_are_warned_of(make_pipe):
    pipe = make_pipe(decoder=make_decoder(trained_sides=(2048, 4096)))
    with pytest.warns(UserWarning, match="256 x 256 pixels is outside"):
        pipe("a", height=64, width=64, num_inference_steps=2)


def test_the_decoder_is_saved_and_loaded_with_the_pipeline(make_pipe, tmp_path):
    pipe = make_pipe(decoder=make_decoder())
    pipe.save_pretrained(tmp_path)
    again = ContinuousBatchingPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    call = {"prompt": "a cat", "height": 64, "width": 64, "num_inference_steps": 2, "seed": 1, "output_type": "pt"}
    assert (pipe(**call).images - again(**call).images).abs().max() <= MAX_ABS
    again._engine.stop()
    stock = QwenImagePipeline.from_pretrained(tmp_path)
    assert not hasattr(stock, "decoder")
    bare = ContinuousBatchingPipeline.from_pretrained(tmp_path, decoder=None)
    assert bare.decoder is None
    assert "decoder" not in bare.components
    half = ContinuousBatchingPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.decoder.transformer.dtype == half.transformer.dtype == torch.bfloat16


def test_moving_and_offloading_reach_the_decoder(make_pipe):
    call = {"prompt": "a cat", "height": 64, "width": 64, "num_inference_steps": 2, "seed": 1, "output_type": "pt"}
    expected = make_pipe(decoder=make_decoder())(**call).images
    pipe = make_pipe(fresh=True, decoder=make_decoder())
    pipe.enable_model_cpu_offload(device="cpu")
    assert hasattr(pipe.decoder.transformer, "_hf_hook")
    assert (pipe(**call).images - expected).abs().max() <= MAX_ABS
    pipe.remove_all_hooks()
    assert not hasattr(pipe.decoder.transformer, "_hf_hook")
    pipe.to(torch.bfloat16)
    assert pipe.decoder.transformer.dtype == torch.bfloat16
    assert pipe(**call).images.shape == (1, 3, 256, 256)


def test_a_decoder_can_be_exchanged(make_pipe):
    pipe = make_pipe(decoder=make_decoder())
    pipe("a", height=64, width=64, num_inference_steps=2)
    pipe.decoder = None
    assert pipe("a", height=64, width=64, num_inference_steps=2).images[0].size == (64, 64)
    with pytest.raises((UnsupportedModelError, ConfigError)):
        pipe.decoder = make_decoder(lq_latent_channels=4)
