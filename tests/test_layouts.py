"""The promise: whatever the layout and the attention backend, the picture is the stock pipeline's solo run."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig

from attention_fakes import FAKES, installed
from conftest import assert_latents_equal, assert_pictures_equal, generator, load_stock, pipelines
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.layouts import Branch, choose_layout, tile_side, tiled
from diffusers_continuous.request import TextEmbeds

LAYOUTS = ["packed", "padded", "tiled"]
BACKENDS = ["sdpa", *FAKES]

VOCABULARY = "a red star left of the big blue circle on white background small green heart above ring"


def call(height: int, width: int, num_words: int = 4, cfg: float = 1.0, **more: Any) -> dict[str, Any]:
    """Arguments of one call, guided where `cfg` is more than 1."""
    words = VOCABULARY.split()
    prompt = " ".join(words[(num_words + i) % len(words)] for i in range(num_words))
    negative = {"negative_prompt": " "} if cfg > 1 else {}
    return {"prompt": prompt, "height": height, "width": width, "true_cfg_scale": cfg, **negative, **more}


def mix(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls with 2 and 3 steps in turn, so that neighbours differ in noise level and some leave before others."""
    return [{"num_inference_steps": 2 + i % 2, **arguments} for i, arguments in enumerate(calls)]


MIXES: dict[str, list[dict[str, Any]]] = {
    "one size": mix(call(96, 96, 5, 4.0), call(96, 96, 9), call(96, 96, 2)),
    "two sizes": mix(call(96, 144, 7), call(96, 96, 5, 4.0), call(96, 96, 2)),
    "four sizes": mix(call(64, 64, 5), call(64, 128, 8, 4.0), call(128, 128, 2), call(192, 64, 12)),
    "transposed": mix(call(64, 128, 6, 4.0), call(128, 64, 6), call(64, 128, 11), call(128, 64, 2, 4.0)),
    "96 with 144": mix(call(96, 96, 5, 4.0), call(144, 144, 7)),
    "80 with 112": mix(call(80, 112, 5, 4.0), call(112, 80, 7), call(80, 80, 3)),
    "a single row": mix(call(96, 144, 7)),
    "a single guided row": mix(call(96, 96, 5, 4.0)),
    "a row that is one tile": mix(call(64, 64, 5), call(64, 128, 8, 4.0), call(128, 64, 1)),
    "guidance off, 2, 4, 7": mix(*(call(64, 64, 5, cfg) for cfg in (1.0, 2.0, 4.0, 7.0))),
    # A word of the vocabulary is a token or two.
    "texts from the shortest to 200 tokens": mix(
        call(64, 96, 0), call(64, 96, 1, 4.0), call(64, 96, 40), call(64, 96, 150, 4.0)
    ),
    "several images per call": mix(
        call(96, 64, 1, 4.0, num_images_per_prompt=3), call(96, 64, 0), call(64, 96, 12, num_images_per_prompt=2)
    ),
}


def fits(layout: str, calls: list[dict[str, Any]]) -> bool:
    """True where the calls' rows can have the layout."""
    return layout != "padded" or len({c["height"] * c["width"] for c in calls}) == 1


in_every_layout_and_backend = pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id="-".join((*kind, name)))
        for kind in itertools.product(LAYOUTS, BACKENDS)
        for name, calls in MIXES.items()
        if fits(kind[0], calls)
    ],
    indirect=["kind"],
)

# Decoding knows neither layouts nor backends: so many pictures are enough with a fake, sdpa draws all.
PICTURES_OF_FAKES = ["transposed", "80 with 112", "several images per call"]


@pytest.fixture(scope="module")
def kind(request):
    """The layout and the backend of a test."""
    return request.param


@pytest.fixture(scope="module")
def shared_pipe(components, kind):
    """One pipeline for all mixes of a kind. First come, first served: all rows begin in one step."""
    layout, backend = kind
    with pipelines(components) as make:
        with contextlib.nullcontext() if backend == "sdpa" else installed(backend, float32=True):
            name = FAKES.get(backend, backend)
            pipe = make(batch_layout=layout, attention_backend=name, scheduler_type="fcfs")
        yield pipe


@pytest.fixture(scope="module")
def solo_run(stock):
    """The stock pipeline's pictures and last latents of call number `seed`, each call run once for all layouts."""
    known: dict[str, tuple[list[Any], torch.Tensor]] = {}

    def run(arguments: dict[str, Any], seed: int) -> tuple[list[Any], torch.Tensor]:
        def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            last.update(tensors)
            return {}

        key, last = repr((arguments, seed)), {}
        if key not in known:
            images = stock(**arguments, generator=generator(seed), callback_on_step_end=keep).images
            known[key] = images, last["latents"]
        return known[key]

    return run


def draw_together(pipe: Any, calls: list[dict[str, Any]], **common: Any) -> tuple[list[Any], list[str]]:
    """The outputs of all calls, which begin in one step, call i with seed i, and the layout of every step."""
    engine, layouts = pipe._engine, []
    states = [
        pipe._make_request(**arguments, **common, generator=generator(seed)) for seed, arguments in enumerate(calls)
    ]
    for state in states:
        engine.submit(state)
    while not all(state.status.is_ending for state in states):
        engine._step()
        for composition in engine.runner._compositions.values():
            assert layouts or len(composition.cond_slices) == sum(len(state.rows) for state in states)
            layouts.append(composition.layout.name)
    outputs = [state.future.final for state in states]
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs, layouts


@in_every_layout_and_backend
def test_every_row_equals_its_stock_solo_run(shared_pipe, solo_run, kind, name):
    layout, backend = kind
    has_pictures = backend == "sdpa" or name in PICTURES_OF_FAKES
    outputs, layouts = draw_together(shared_pipe, MIXES[name], output_type="pil" if has_pictures else "latent")
    for seed, (arguments, output) in enumerate(zip(MIXES[name], outputs, strict=True)):
        images, latents = solo_run(arguments, seed)
        assert_latents_equal(output.latents, latents)
        if has_pictures:
            for ours, expected in zip(output.images, images, strict=True):
                assert_pictures_equal(ours, expected)
    assert set(layouts) == {layout}


@pytest.mark.parametrize("name", MIXES)
def test_auto_is_packed(name):
    branches = [make_branch(row, c["height"], c["width"]) for row, c in enumerate(MIXES[name])]
    assert choose_layout("auto", branches) == "packed"


def encode(pipe: Any, calls: list[dict[str, Any]]) -> tuple[list[Any], Any]:
    """Encoded rows of calls, call i with seed i, each at a noise level of its own, and the model that steps them."""
    rows = [
        row
        for seed, arguments in enumerate(calls)
        for row in pipe._make_request(**{**arguments, "num_inference_steps": 50}, generator=generator(seed)).rows
    ]
    for index, row in enumerate(rows):
        row.step = index
    model = pipe._engine.runner._model
    with torch.no_grad():
        model.prepare_encode(rows)
    return rows, model


@torch.no_grad()
def predict(model: Any, rows: list[Any]) -> list[torch.Tensor]:
    return model.denoise_step(InputBatch.make(rows, model))


@pytest.fixture(scope="module")
def rows_of(components):
    """The encoded rows of a mix and two that may stand in for their neighbours, made once: no forward changes a row."""
    known: dict[str, tuple[list[Any], list[Any]]] = {}
    with pipelines(components) as make:
        pipe = make(batch_layout="packed")

        def rows_of(name: str) -> tuple[list[Any], list[Any]]:
            if name not in known:
                height, width = MIXES[name][0]["height"], MIXES[name][0]["width"]
                others = call(height, width, 30, 7.0), call(height, width, 18)  # of one size with the first row
                rows, _ = encode(pipe, [*MIXES[name], *others])
                known[name] = rows[:-2], rows[-2:]
            return known[name]

        yield rows_of


@in_every_layout_and_backend
def test_rows_do_not_depend_on_their_order_or_their_neighbours(shared_pipe, rows_of, kind, name):
    model = shared_pipe._engine.runner._model
    rows, others = rows_of(name)
    together = predict(model, rows)
    for ours, expected in zip(predict(model, rows[::-1]), together[::-1], strict=True):
        assert_close(ours, expected)
    for row, expected in zip(rows, together, strict=True):
        assert_close(predict(model, [others[0], row, others[1]])[1], expected)


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    """One guided prediction, of size 1: the sums of attention in another order, times the guidance scale."""
    assert (a - b).abs().max() <= 5e-5
    assert (a - b).abs().mean() <= 2e-6


@pytest.mark.parametrize("name", ["four sizes", "transposed", "80 with 112", "a single guided row"])
def test_tiles_change_no_bit(make_pipe, name):
    rows, model = encode(make_pipe(batch_layout="packed"), MIXES[name])
    expected = predict(model, rows)
    model.batch_layout = "tiled"
    for ours, packed in zip(predict(model, rows), expected, strict=True):
        assert torch.equal(ours, packed)


# ---------------------------------------------------------------------- tiled


def make_branch(row: int, height: int, width: int) -> Branch:
    return Branch(row, row, 0, 1, False, TextEmbeds(torch.zeros(3 + row, 8), 3 + row), height, width)


def make_tiled(*sizes: tuple[int, int]) -> Any:
    branches = [make_branch(row, *size) for row, size in enumerate(sizes)]
    rotary = [torch.zeros(branch.length, 4, dtype=torch.complex64) for branch in branches]
    return tiled(branches, tuple(slice(i, i + 1) for i in range(len(sizes))), rotary)


def test_1024_with_768_and_512x1024_gives_256_pixel_tiles_16_9_and_8_of_them():
    sizes = [(1024, 1024), (768, 768), (512, 1024)]
    assert tile_side(sizes) == 256
    image = make_tiled(*sizes).image
    ((run),) = image.runs
    assert (run.num_rows, run.length) == (33, 16 * 16)
    assert np.bincount(image.modulation_index).tolist() == [16, 9, 8]


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ([(96, 96), (144, 144)], 48),
        ([(80, 112), (112, 80)], 16),
        ([(112, 112)], 112),
        ([(96, 192), (192, 96)], 96),
        ([(16, 16), (1024, 1024)], 16),
    ],
)
def test_a_tile_is_the_largest_square_that_tiles_all_images(sizes, side):
    assert tile_side(sizes) == side


def test_tiles_are_squares_of_one_image_and_go_back_where_they_were():
    sizes = [(96, 192), (96, 96), (192, 96)]
    layout = make_tiled(*sizes)
    places = torch.cat(
        [
            torch.tensor([(row, y, x) for y in range(height // 16) for x in range(width // 16)])
            for row, (height, width) in enumerate(sizes)
        ]
    )
    scattered = places[layout.scatter_index].view(-1, 6, 6, 3)  # tiles of 96 pixels
    assert (scattered[..., 0] == scattered[:, :1, :1, 0]).all()
    assert torch.equal(scattered[:, 0, 0, 0], layout.image.modulation_index)
    for tile in scattered:
        assert torch.equal(tile[..., 1] - tile[0, 0, 1], torch.arange(6)[:, None].expand(6, 6))
        assert torch.equal(tile[..., 2] - tile[0, 0, 2], torch.arange(6).expand(6, 6))
    assert torch.equal(places[layout.scatter_index][layout.recover_index], places)
    num_text = len(layout.text_index)
    joint = torch.cat([torch.full((num_text, 3), -1), places[layout.scatter_index]])[layout.joint_index]
    assert torch.equal(joint[joint[:, 0] >= 0], places)  # attention sees image order
    assert torch.equal(joint[layout.image_index], places[layout.scatter_index])


# ---------------------------------------------------------------------- padded


@pytest.fixture
def masks(monkeypatch):
    """The `attn_mask` of every call of torch's attention."""
    seen, attend = [], F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert len(args) == 3
        seen.append(kwargs.get("attn_mask"))
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_mask_where_nothing_is_padded(make_pipe, masks, layout):
    rows, model = encode(make_pipe(batch_layout=layout), mix(call(96, 192, 6), call(192, 96, 6), call(96, 192, 6)))
    masks.clear()  # the text encoder's
    batch = InputBatch.make(rows, model)
    with torch.no_grad():
        model.denoise_step(batch)
    assert batch.layout.name == layout
    assert batch.layout.joint.valid is None
    assert masks
    assert all(mask is None for mask in masks)


def test_padding_is_masked_by_one_small_mask(make_pipe, masks):
    rows, model = encode(make_pipe(batch_layout="padded"), mix(call(96, 96, 2, 4.0), call(96, 96, 20)))
    masks.clear()
    batch = InputBatch.make(rows, model)
    with torch.no_grad():
        model.denoise_step(batch)
    texts = [branch.text.num_tokens for branch in batch.composition.branches]
    assert len(set(texts)) > 1
    assert len({id(mask) for mask in masks}) == 1  # made once for all blocks
    assert masks[0].dtype == torch.bool
    assert masks[0].shape == (3, 1, 1, max(texts) + 36)
    assert masks[0].sum((1, 2, 3)).tolist() == [length + 36 for length in texts]
    assert batch.composition.prompt_embeds.shape[0] == 3 * max(texts)


def test_garbage_in_padded_slots_changes_nothing(make_pipe):
    calls = mix(call(96, 96, 2, 4.0), call(96, 96, 20), call(96, 96, 0))
    rows, model = encode(make_pipe(batch_layout="padded"), calls)
    batch = InputBatch.make(rows, model)
    composition, longest = batch.composition, max(b.text.num_tokens for b in batch.composition.branches)
    is_word = batch.layout.joint.valid.view(batch.layout.num_rows, -1)[:, :longest].reshape(-1, 1)
    assert not composition.prompt_embeds[~is_word[:, 0]].any()
    garbage = torch.randn(composition.prompt_embeds.shape, generator=generator(0)).mul(1e4)
    spoilt = replace(composition, prompt_embeds=torch.where(is_word, composition.prompt_embeds, garbage))
    with torch.no_grad():
        clean = model.denoise_step(batch)
        for ours, expected in zip(model.denoise_step(replace(batch, composition=spoilt)), clean, strict=True):
            assert torch.equal(ours, expected)


def test_rows_that_cannot_be_padded_are_packed(make_pipe, solo_run):
    calls = MIXES["two sizes"]
    outputs, layouts = draw_together(make_pipe(batch_layout="padded"), calls)
    assert layouts == ["packed", "packed", "padded"]  # as soon as they can be
    for seed, (arguments, output) in enumerate(zip(calls, outputs, strict=True)):
        assert_latents_equal(output.latents, solo_run(arguments, seed)[1])


# ---------------------------------------------------------------------- with a step cache


@pytest.fixture(scope="module")
def step_cached():
    """Calls, and what the stock pipeline makes of each with a step cache."""
    stock = load_stock()
    stock.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.12))
    calls = [call(96, 192, 3, num_inference_steps=10), call(192, 96, 9, num_inference_steps=8)]
    return calls, [stock(**c, generator=generator(seed), output_type="latent").images for seed, c in enumerate(calls)]


@pytest.mark.parametrize("layout", ["padded", "tiled"])
def test_a_step_cache_sees_packed_rows_and_decides_as_ever(make_pipe, step_cached, layout):
    calls, expected = step_cached
    pipe = make_pipe(batch_layout=layout, step_cache_threshold=0.12, scheduler_type="fcfs")
    outputs, layouts = draw_together(pipe, calls, output_type="latent")
    for output, latents in zip(outputs, expected, strict=True):
        assert_latents_equal(output.latents, latents)
    assert set(layouts) == {"packed"}
