"""Real pipelines on the embedded model. The oracle has its own components, which nothing of ours ever touches."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import QwenImagePipeline

from diffusers_continuous import ContinuousBatchingPipeline, embedded
from diffusers_continuous.devices import best_device

# fp32 latents against the stock pipeline's, after up to 30 steps: the same sums in another order, nothing else.
MAX_ABS = 1e-4
MEAN_ABS = 3e-6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` or `npu` need one."""
    for kind in ("cuda", "npu"):
        if best_device().type != kind:
            for item in items:
                if item.get_closest_marker(kind):
                    item.add_marker(pytest.mark.skip(reason=f"needs {kind}, which is not here"))


def load_stock(dtype: torch.dtype = torch.float32) -> QwenImagePipeline:
    """A stock pipeline with fresh components."""
    pipe = QwenImagePipeline.from_pretrained(embedded.embedded_model_path(), dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generator(seed: int) -> torch.Generator:
    """A CPU generator."""
    return torch.Generator().manual_seed(seed)


def assert_latents_equal(ours: torch.Tensor, stock: torch.Tensor) -> None:
    """Within the project's float32 tolerance, and of one shape and dtype."""
    assert ours.shape == stock.shape
    assert ours.dtype == stock.dtype
    difference = (ours - stock).abs()
    assert difference.max() <= MAX_ABS
    assert difference.mean() <= MEAN_ABS


def assert_pictures_equal(ours: Any, stock: Any) -> None:
    """uint8 pictures: no pixel differs by more than 1, at most 0.5 % differ at all."""
    a, b = (np.asarray(picture).astype(int) for picture in (ours, stock))
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= 1
    assert (a != b).mean() <= 0.005


@pytest.fixture(scope="session")
def stock() -> QwenImagePipeline:
    """The oracle."""
    return load_stock()


@pytest.fixture(scope="session")
def components() -> dict[str, Any]:
    """Components that our pipelines share among tests which do not change them."""
    components = load_stock().components
    # What is here now stays: the collection after each test need not look through it, which took a fifth of a second.
    gc.collect()
    gc.freeze()
    return components


@contextlib.contextmanager
def pipelines(components: dict[str, Any]) -> Iterator[Callable[..., ContinuousBatchingPipeline]]:
    """Builds pipelines over these (or, with `fresh=True`, own) components; stops their engines afterwards."""
    made: list[ContinuousBatchingPipeline] = []

    def make(
        fresh: bool = False, dtype: torch.dtype = torch.float32, decoder: Any = None, **options: Any
    ) -> ContinuousBatchingPipeline:
        parts = load_stock(dtype).components if fresh or dtype != torch.float32 else components
        pipe = ContinuousBatchingPipeline(**parts, default_sample_size=16, decoder=decoder)
        pipe.set_progress_bar_config(disable=True)
        if options:
            pipe.init_continuous_batching(**options)
        made.append(pipe)
        return pipe

    try:
        yield make
    finally:
        for pipe in made:
            with contextlib.suppress(Exception):
                if pipe._engine is not None:
                    pipe._engine.stop(hard_stop=True)


@pytest.fixture
def loggers_kept() -> Iterator[None]:
    """For tests of scripts that silence libraries, which other tests listen to."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "diffusers_continuous", "transformers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for library in (diffusers, transformers):
        library.utils.logging.enable_progress_bar()


@pytest.fixture
def make_pipe(components: dict[str, Any]) -> Iterator[Callable[..., ContinuousBatchingPipeline]]:
    """Builds pipelines over shared (or, with `fresh=True`, own) components; stops their engines afterwards."""
    with pipelines(components) as make:
        yield make
    gc.collect()


@pytest.fixture
def pipe(make_pipe: Callable[..., ContinuousBatchingPipeline]) -> ContinuousBatchingPipeline:
    """One of our pipelines, its engine not started yet."""
    return make_pipe()
