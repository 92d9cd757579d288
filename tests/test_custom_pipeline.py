"""`custom_pipeline=` gives our pipeline through Diffusers' own loader, from the folder in this repository."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils

from diffusers_continuous import ContinuousBatchingPipeline, embedded_model_path

FOLDER = Path(__file__).parents[1] / "pipelines" / "qwen_image_continuous"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads by folder with a module cache of its own, so that no older copy of the file is found."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(**kwargs):
        return DiffusionPipeline.from_pretrained(str(embedded_model_path()), custom_pipeline=str(FOLDER), **kwargs)

    yield load
    for name in [name for name in sys.modules if name.startswith("diffusers_modules")]:
        del sys.modules[name]


def test_it_is_our_pipeline_and_draws_the_same_picture(load):
    pipe = load(trust_remote_code=True)
    assert type(pipe) is ContinuousBatchingPipeline
    stock = DiffusionPipeline.from_pretrained(str(embedded_model_path()))
    stock.set_progress_bar_config(disable=True)
    ours, theirs = (
        one(
            "a red star on a blue background",
            negative_prompt=" ",
            height=64,
            width=96,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
        for one in (pipe, stock)
    )
    assert np.abs(np.asarray(ours, np.int16) - np.asarray(theirs, np.int16)).max() <= 1


def test_code_is_not_run_unasked(load):
    with pytest.raises(ValueError, match="trust_remote_code"):
        load()


def test_one_pipeline_class_is_visible_in_the_file():
    namespace: dict[str, object] = {}
    exec((FOLDER / "pipeline.py").read_text(), namespace)
    classes = [c for c in namespace.values() if inspect.isclass(c) and issubclass(c, DiffusionPipeline)]
    assert classes == [ContinuousBatchingPipeline]
