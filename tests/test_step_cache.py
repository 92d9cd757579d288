"""The step cache: the same decisions and pictures as diffusers' first-block cache alone, in a crowd too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, QwenImagePipeline

from conftest import assert_latents_equal, generator, load_stock
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.errors import ConfigError
from diffusers_continuous.models.step_cache import BranchCache

THRESHOLD = 0.12
CALLS: list[dict[str, Any]] = [
    {"prompt": "a red star on a blue background", "height": 128, "width": 128, "num_inference_steps": 20},
    {"prompt": "a large green ring on a white background", "height": 96, "width": 64, "num_inference_steps": 12},
    {"prompt": "a black cross above a yellow heart on a red background", "height": 64, "width": 96},
    {"prompt": "a white square", "height": 64, "width": 64, "true_cfg_scale": 1.0, "num_inference_steps": 16},
]


def arguments(call: dict[str, Any], seed: int) -> dict[str, Any]:
    negative = {} if call.get("true_cfg_scale") == 1.0 else {"negative_prompt": " "}
    return {"num_inference_steps": 20, "output_type": "latent", **negative, **call, "generator": generator(seed)}


@pytest.fixture(scope="module")
def cached_stock() -> Iterator[QwenImagePipeline]:
    """The stock pipeline with diffusers' own first-block cache."""
    pipe = load_stock()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLD))
    yield pipe
    pipe.transformer.disable_cache()


def test_every_row_of_a_crowd_equals_the_stock_pipeline_with_diffusers_first_block_cache(make_pipe, cached_stock):
    pipe = make_pipe(step_cache_threshold=THRESHOLD, scheduler_type="fcfs")  # a row that makes way loses its cache
    outputs = pipe.generate_batch([arguments(call, seed) for seed, call in enumerate(CALLS)])
    for seed, (call, output) in enumerate(zip(CALLS, outputs.values(), strict=True)):
        expected = cached_stock(**arguments(call, seed)).images
        assert_latents_equal(output.latents, expected)


def test_at_least_a_quarter_of_the_block_evaluations_is_saved(make_pipe, stock):
    pipe = make_pipe(step_cache_threshold=THRESHOLD)
    latents = pipe(**arguments(CALLS[0], 0)).images
    stats = pipe._engine.stats()
    num_blocks = len(pipe.transformer.transformer_blocks)
    evaluations = num_blocks * stats.num_branch_steps - (num_blocks - 1) * stats.num_skipped_branch_steps
    assert stats.num_branch_steps == 40
    assert num_blocks * stats.num_branch_steps / evaluations >= 1.3
    assert not torch.equal(latents, stock(**arguments(CALLS[0], 0)).images)


def test_without_a_threshold_nothing_is_skipped(pipe, stock):
    assert_latents_equal(pipe(**arguments(CALLS[1], 1)).images, stock(**arguments(CALLS[1], 1)).images)
    assert pipe._engine.stats().num_skipped_branch_steps == 0


def test_what_is_kept_goes_with_the_row(make_pipe):
    def kept_bytes() -> int:
        gc.collect()
        return sum(o.num_bytes for o in gc.get_objects() if type(o) is BranchCache)

    pipe = make_pipe(step_cache_threshold=THRESHOLD)
    call = {**arguments(CALLS[3], 3), "generator": None, "seed": 3}
    pipe(**call)
    assert kept_bytes() == 0
    stream = pipe.stream(**call)
    while next(stream).step < 3:
        pass
    assert kept_bytes() > 0
    stream.close()
    pipe(**call)
    assert kept_bytes() == 0


@pytest.mark.parametrize("value", [-0.1, 1.0, "0.1", None])
def test_a_threshold_that_makes_no_sense_is_refused(make_pipe, value):
    with pytest.raises(ConfigError, match="step_cache_threshold"):
        make_pipe(step_cache_threshold=value)


def test_what_is_kept_goes_first_when_memory_runs_out(make_pipe):
    pipe = make_pipe(step_cache_threshold=THRESHOLD, scheduler_type="fcfs")
    engine = pipe._engine
    model, sizes = engine.runner._model, []
    denoise_step = model.denoise_step

    def no_room_for_caches(batch: InputBatch) -> list[torch.Tensor]:
        kept = sum(cache.num_bytes for row in batch.rows for cache in row.step_cache.values())
        sizes.append((len(batch.rows), kept > 0))
        if len(sizes) > 4 and kept:
            raise torch.OutOfMemoryError("no room")
        return denoise_step(batch)

    model.denoise_step = no_room_for_caches
    call = {**arguments(CALLS[3], 0), "num_inference_steps": 6, "generator": None}
    outputs = pipe.generate_batch([{**call, "seed": seed} for seed in range(3)])
    assert all(output.error is None for output in outputs.values())
    assert sizes[4:8] == [(3, True), (3, False), (3, True), (3, False)]  # nobody had to leave the batch
    assert engine.stats().max_batch_tokens == engine.scheduler.config.max_batch_tokens


@pytest.mark.parametrize("verb", ["prepare_encode", "post_decode"])
def test_what_others_keep_goes_before_a_row_fails_for_want_of_memory(make_pipe, verb):
    pipe = make_pipe(step_cache_threshold=THRESHOLD, scheduler_type="fcfs")
    engine = pipe._engine
    call = {**arguments(CALLS[3], 0), "generator": None, "output_type": "pil"}
    long = pipe._make_request(**{**call, "num_inference_steps": 8}, seed=1)
    engine.submit(long)
    while long.step < 4:
        engine._step()
    work, was_in_the_way = getattr(engine.runner._model, verb), []

    def no_room_beside_caches(rows: Any) -> None:
        was_in_the_way.append(any(cache.num_bytes for cache in long.rows[0].step_cache.values()))
        if was_in_the_way[-1]:
            raise torch.OutOfMemoryError("no room")
        work(rows)

    setattr(engine.runner._model, verb, no_room_beside_caches)
    short = pipe._make_request(**{**call, "prompt": "a new prompt", "num_inference_steps": 2}, seed=2)
    engine.submit(short)
    while not (long.status.is_ending and short.status.is_ending):
        engine._step()
    assert (long.error, short.error) == (None, None)
    assert was_in_the_way[:2] == [True, False]
    assert engine.stats().num_batch_retries > 0


@pytest.mark.parametrize("until", ["_step_cache", "denoise_step"])  # before or after the caches are filled
def test_a_batch_that_is_too_large_even_without_what_is_kept_is_split(make_pipe, until):
    pipe = make_pipe(step_cache_threshold=THRESHOLD, scheduler_type="fcfs")
    engine, sizes = pipe._engine, []
    model = engine.runner._model
    work = getattr(model, until)

    def no_room_for_three(batch: InputBatch) -> Any:
        result = work(batch)
        sizes.append(len(batch.rows))
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("no room")
        return result

    setattr(model, until, no_room_for_three)
    call = {**arguments(CALLS[3], 0), "num_inference_steps": 4, "generator": None}
    states = [pipe._make_request(**call, seed=seed) for seed in range(4)]
    for state in states:
        engine.submit(state)
    while not all(state.status.is_ending for state in states):
        engine._step()
    assert [state.error for state in states] == [None] * 4
    assert sizes[:3] == [4, 2, 2]


def test_a_paused_row_keeps_nothing(make_pipe):
    pipe = make_pipe(step_cache_threshold=THRESHOLD, scheduler_type="edf", max_requests_per_batch=1)
    engine = pipe._engine
    call = {**arguments(CALLS[3], 0), "generator": None}
    paused, urgent = (pipe._make_request(**call, seed=seed, deadline_s=limit) for seed, limit in ((1, 1e6), (2, 1.0)))
    engine.submit(paused)
    while paused.rows[0].step < 3:
        engine._step()
    assert paused.rows[0].step_cache
    engine.submit(urgent)
    engine._step()
    assert (paused.rows[0].step, urgent.rows[0].step) == (3, 1)
    assert not paused.rows[0].step_cache
    assert urgent.rows[0].step_cache
