"""The promise: whatever the layout and the attention backend, the picture is the stock pipeline's solo run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig

from attention_fakes import FAKES, installed
from conftest import assert_latents_equal, assert_pictures_equal, generator, load_stock
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.layouts import Branch, choose_layout, tile_side, tiled
from diffusers_continuous.request import TextEmbeds

LAYOUTS = ["packed", "padded", "tiled"]
BACKENDS = ["sdpa", *FAKES]

VOCABULARY = "a red star left of the big blue circle on white background small green heart above ring"


def call(height: int, width: int, num_words: int = 4, cfg: float = 1.0, steps: int = 4, **more: Any) -> dict[str, Any]:
    """Arguments of one call, guided where `cfg` is more than 1."""
    words = VOCABULARY.split()
    prompt = " ".join(words[(num_words + i) % len(words)] for i in range(num_words))
    negative = {"negative_prompt": " "} if cfg > 1 else {}
    sizes = {"height": height, "width": width, "num_inference_steps": steps, "true_cfg_scale": cfg}
    return {"prompt": prompt, **sizes, **negative, **more}


MIXES: dict[str, list[dict[str, Any]]] = {
    "one size": [call(96, 96, 3, 4.0, 6), call(96, 96, 9), call(96, 96, 3, steps=5)],
    "two sizes": [call(96, 96, 5, 4.0), call(96, 144, 7), call(96, 96, 2)],
    "four sizes": [call(128, 128, 5), call(64, 128, 8, 4.0), call(64, 64, 2, steps=6), call(192, 64, 12)],
    "transposed": [call(96, 192, 6, 4.0), call(192, 96, 6), call(96, 192, 11), call(192, 96, 2, 4.0)],
    "96 with 144": [call(96, 96, 5, 4.0), call(144, 144, 7)],
    "80 with 112": [call(80, 112, 5, 4.0), call(112, 80, 7), call(80, 80, 3)],
    "a single row": [call(96, 192, 6)],
    "a single guided row": [call(192, 96, 6, 4.0)],
    "a row that is one tile": [call(64, 64, 5), call(64, 192, 7, 4.0), call(128, 64, 1)],
    "guidance off, 2, 4, 7": [call(96, 96, 5, cfg) for cfg in (1.0, 2.0, 4.0, 7.0)],
    # A word of the vocabulary is a token or two.
    "texts from the shortest to 200 tokens": [call(64, 96, n, cfg) for n, cfg in ((0, 1.0), (1, 4.0), (40, 1.0))]
    + [call(64, 96, 150, 4.0)],
    "several images per call": [
        call(96, 64, 1, 4.0, num_images_per_prompt=3),
        call(96, 64, 0),
        call(64, 96, 12, num_images_per_prompt=2),
    ],
}


FEW = ["transposed", "80 with 112", "texts from the shortest to 200 tokens"]  # of which the fakes get some


def fits(layout: str, calls: list[dict[str, Any]]) -> bool:
    """True where the calls' rows can have the layout."""
    return layout != "padded" or len({c["height"] * c["width"] for c in calls}) == 1


def cases(mixes: list[str], mixes_of_fakes: list[str]) -> list[tuple[str, str, str]]:
    """Layout, backend and mix of every test."""
    return [
        (layout, backend, mix)
        for layout in LAYOUTS
        for backend in BACKENDS
        for mix in (mixes if backend == "sdpa" else mixes_of_fakes)
        if fits(layout, MIXES[mix])
    ]


@pytest.fixture
def backend(request):
    """The `attention_backend` that a test names, there as long as the test runs."""
    if request.param == "sdpa":
        yield "sdpa"
    else:
        with installed(request.param, float32=True):
            yield FAKES[request.param]


@pytest.fixture(scope="module")
def solo_latents(stock):
    """The stock pipeline's latents of call number `seed`, each call run once for all layouts."""
    known: dict[str, torch.Tensor] = {}

    def latents(arguments: dict[str, Any], seed: int) -> torch.Tensor:
        key = repr((arguments, seed))
        if key not in known:
            known[key] = stock(**arguments, generator=generator(seed), output_type="latent").images
        return known[key]

    return latents


def draw_together(pipe: Any, calls: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    """The images of all calls, which begin in one step, and the names of the layouts they ran in."""
    engine, layouts = pipe._engine, []
    states = [pipe._make_request(**arguments) for arguments in calls]
    for state in states:
        engine.submit(state)
    while not all(state.status.is_ending for state in states):
        engine._step()
        layouts += [composition.layout.name for composition in engine.runner._compositions.values()]
    outputs = [state.future.final for state in states]
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.latents if output.images is None else output.images for output in outputs], layouts


@pytest.mark.parametrize(("layout", "backend", "mix"), cases([*MIXES], FEW), indirect=["backend"])
def test_every_row_equals_its_stock_solo_run(backend, make_pipe, solo_latents, layout, mix):
    pipe, calls = make_pipe(batch_layout=layout, attention_backend=backend), MIXES[mix]
    drawn, layouts = draw_together(
        pipe, [{**c, "generator": generator(seed), "output_type": "latent"} for seed, c in enumerate(calls)]
    )
    for seed, (arguments, ours) in enumerate(zip(calls, drawn, strict=True)):
        assert_latents_equal(ours, solo_latents(arguments, seed))
    assert set(layouts) == {layout}


@pytest.mark.parametrize("mix", MIXES)
def test_auto_is_packed(mix):
    branches = [make_branch(row, c["height"], c["width"]) for row, c in enumerate(MIXES[mix])]
    assert choose_layout("auto", branches) == "packed"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_equal_the_stock_pictures(make_pipe, stock, layout):
    calls = MIXES["transposed"][:2]
    drawn, _ = draw_together(
        make_pipe(batch_layout=layout), [{**c, "generator": generator(seed)} for seed, c in enumerate(calls)]
    )
    for seed, (arguments, (ours,)) in enumerate(zip(calls, drawn, strict=True)):
        assert_pictures_equal(ours, stock(**arguments, generator=generator(seed)).images[0])


@pytest.fixture
def rows_and_model(make_pipe):
    """Makes encoded rows of calls, the noise of call i drawn from `seeds[i]`, and the model that steps them."""

    def make(layout: str, calls: list[dict[str, Any]], backend: str = "sdpa") -> tuple[list[Any], Any]:
        pipe = make_pipe(batch_layout=layout, attention_backend=backend)
        model = pipe._engine.runner._model
        rows = [
            row
            for seed, arguments in enumerate(calls)
            for row in pipe._make_request(**arguments, generator=generator(seed)).rows
        ]
        with torch.no_grad():
            model.prepare_encode(rows)
        return rows, model

    return make


@torch.no_grad()
def predict(model: Any, rows: list[Any]) -> list[torch.Tensor]:
    return model.denoise_step(InputBatch.make(rows, model))


@pytest.mark.parametrize(("layout", "backend", "mix"), cases(["one size", *FEW], ["transposed"]), indirect=["backend"])
def test_rows_do_not_depend_on_their_order_or_their_neighbours(backend, rows_and_model, layout, mix):
    calls = MIXES[mix]
    height, width = calls[0]["height"], calls[0]["width"]
    others = [call(height, width, 30, 7.0), call(height, width, 18)]  # of one size with the first row
    rows, model = rows_and_model(layout, [*calls, *others], backend)
    rows, others = rows[: -len(others)], rows[-len(others) :]
    together = predict(model, rows)
    for ours, expected in zip(predict(model, rows[::-1]), together[::-1], strict=True):
        assert_close(ours, expected)
    for row, expected in zip(rows, together, strict=True):
        assert_close(predict(model, [others[0], row, others[1]])[1], expected)


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    """One guided prediction, of size 1: the sums of attention in another order, times the guidance scale."""
    assert (a - b).abs().max() <= 5e-5
    assert (a - b).abs().mean() <= 2e-6


@pytest.mark.parametrize("mix", ["four sizes", "transposed", "80 with 112", "a single guided row"])
def test_tiles_change_no_bit(rows_and_model, mix):
    rows, model = rows_and_model("packed", MIXES[mix])
    expected = predict(model, rows)
    model.batch_layout = "tiled"
    for ours, packed in zip(predict(model, rows), expected, strict=True):
        assert torch.equal(ours, packed)


# ---------------------------------------------------------------------- tiled


def make_branch(row: int, height: int, width: int) -> Branch:
    return Branch(row, row, 1, False, TextEmbeds(torch.zeros(3 + row, 8), 3 + row), height, width)


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
def test_no_mask_where_nothing_is_padded(rows_and_model, masks, layout):
    rows, model = rows_and_model(layout, [call(96, 192, 6), call(192, 96, 6), call(96, 192, 6)])
    masks.clear()  # the text encoder's
    batch = InputBatch.make(rows, model)
    with torch.no_grad():
        model.denoise_step(batch)
    assert batch.layout.name == layout
    assert batch.layout.joint.valid is None
    assert masks
    assert all(mask is None for mask in masks)


def test_padding_is_masked_by_one_small_mask(rows_and_model, masks):
    rows, model = rows_and_model("padded", [call(96, 96, 2, 4.0), call(96, 96, 20)])
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


def test_garbage_in_padded_slots_changes_nothing(rows_and_model):
    rows, model = rows_and_model("padded", [call(96, 96, 2, 4.0), call(96, 96, 20), call(96, 96, 0)])
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


def test_rows_that_cannot_be_padded_are_packed(make_pipe, solo_latents):
    calls = [call(96, 96, 5, 4.0), call(96, 96, 9), call(96, 144, 7, steps=2)]
    drawn, layouts = draw_together(
        make_pipe(batch_layout="padded"),
        [{**c, "generator": generator(seed), "output_type": "latent"} for seed, c in enumerate(calls)],
    )
    assert layouts[:2] == ["packed"] * 2
    assert set(layouts[2:]) == {"padded"}  # as soon as they can be
    for seed, (arguments, ours) in enumerate(zip(calls, drawn, strict=True)):
        assert_latents_equal(ours, solo_latents(arguments, seed))


# ---------------------------------------------------------------------- with a step cache


@pytest.mark.parametrize("layout", ["padded", "tiled"])
def test_a_step_cache_sees_packed_rows_and_decides_as_ever(make_pipe, layout):
    cached_stock = load_stock()
    cached_stock.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.12))
    calls = [call(96, 192, 3, steps=10), call(192, 96, 9, steps=8)]
    drawn, layouts = draw_together(
        make_pipe(batch_layout=layout, step_cache_threshold=0.12),
        [{**c, "generator": generator(seed), "output_type": "latent"} for seed, c in enumerate(calls)],
    )
    for seed, (arguments, ours) in enumerate(zip(calls, drawn, strict=True)):
        assert_latents_equal(ours, cached_stock(**arguments, generator=generator(seed), output_type="latent").images)
    assert set(layouts) == {"packed"}
