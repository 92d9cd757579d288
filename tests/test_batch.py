"""The packed layout: where every token lies, and that a batch is taken apart as it was put together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import generator
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.layouts import _runs


def test_runs_are_neighbours_of_one_length_and_skip_empty_rows():
    runs = _runs(np.array([0, 0, 3, 3, 5]))
    assert [(r.start, r.stop, r.first_row, r.num_rows, r.length) for r in runs] == [(0, 6, 2, 2, 3), (6, 11, 4, 1, 5)]


def rows_and_model(pipe, *calls):
    model = pipe.init_continuous_batching().runner._model
    return [row for call in calls for row in pipe._make_request(**call).rows], model


def encoded_rows(pipe, *calls):
    rows, model = rows_and_model(pipe, *calls)
    with torch.no_grad():
        model.prepare_encode(rows)
    return rows, model


CALLS = [
    {"prompt": "a ring", "height": 64, "width": 96, "negative_prompt": " ", "true_cfg_scale": 2.0},
    {"prompt": "a red star on a blue background", "height": 96, "width": 64},
    {"prompt": "x", "height": 64, "width": 64, "negative_prompt": "blurry", "true_cfg_scale": 7.0},
]


def test_every_joint_row_is_its_text_then_its_image(pipe):
    rows, model = encoded_rows(pipe, *CALLS)
    batch = InputBatch.make(rows, model)
    layout, branches = batch.layout, batch.composition.branches
    assert len(branches) == 5  # guided rows have two
    total = sum(branch.length for branch in branches)
    assert sorted(layout.joint_index.tolist()) == list(range(total))
    num_text = sum(branch.text.num_tokens for branch in branches)
    start, text_seen, image_seen = 0, 0, 0
    for branch in branches:
        words = branch.text.num_tokens
        joint = layout.joint_index[start : start + branch.length].tolist()
        assert joint[:words] == list(range(text_seen, text_seen + words))
        assert joint[words:] == [num_text + image_seen + i for i in range(branch.num_image_tokens)]
        start, text_seen, image_seen = start + branch.length, text_seen + words, image_seen + branch.num_image_tokens
    joint_tokens = torch.arange(total)[layout.joint_index]
    assert torch.equal(joint_tokens[layout.text_index], torch.arange(num_text))
    assert torch.equal(joint_tokens[layout.image_index], torch.arange(num_text, total))
    assert layout.rotary.shape == (total, 16)


def test_scatter_hands_every_row_its_own_conditional_tokens(pipe):
    rows, model = encoded_rows(pipe, *CALLS)
    batch = InputBatch.make(rows, model)
    for row, latents in zip(rows, batch.scatter(batch.latents), strict=True):
        assert torch.equal(latents, row.latents)


def test_a_batch_of_the_same_rows_keeps_its_composition_and_a_changed_text_does_not(pipe):
    rows, model = encoded_rows(pipe, *CALLS)
    first = InputBatch.make(rows, model)
    second = InputBatch.make(rows, model, first.composition)
    assert second.composition is first.composition
    rows[0].text = rows[1].text  # as a callback may do
    assert InputBatch.make(rows, model, first.composition).composition is not first.composition
    assert InputBatch.make(rows[:2], model, first.composition).composition is not first.composition


def test_rows_are_invariant_under_order_and_neighbours(pipe):
    rows, model = encoded_rows(pipe, *CALLS)
    with torch.no_grad():
        together = model.denoise_step(InputBatch.make(rows, model))
        backwards = model.denoise_step(InputBatch.make(rows[::-1], model))[::-1]
        for row, a, b in zip(rows, together, backwards, strict=True):
            (alone,) = model.denoise_step(InputBatch.make([row], model))
            assert torch.equal(a, alone)  # to the last bit, on a CPU
            assert torch.equal(b, alone)


CHOICES = [[0], [1], [2], [4], [0, 1], [1, 0], [0, 2], [3, 4], [1, 2, 4]]


@pytest.mark.parametrize("num_pictures", [2, 3, 5])
@pytest.mark.parametrize("has_neighbour", [False, True])
def test_a_picture_is_invariant_under_which_others_of_its_call_step_with_it(pipe, num_pictures, has_neighbour):
    call = {**CALLS[0], "prompt": "", "num_images_per_prompt": num_pictures}
    rows, model = encoded_rows(pipe, call, CALLS[1])
    *rows, neighbour = rows
    others = [neighbour] if has_neighbour else []
    with torch.no_grad():
        together = model.denoise_step(InputBatch.make(rows, model))
        for chosen in CHOICES:
            if max(chosen) < num_pictures:
                batch = InputBatch.make([*others, *(rows[index] for index in chosen)], model)
                for index, ours in zip(chosen, model.denoise_step(batch)[len(others) :], strict=True):
                    assert torch.equal(ours, together[index]), (chosen, index)


def test_a_repeated_prompt_is_encoded_once_and_a_bounded_number_is_kept(make_pipe):
    pipe = make_pipe(prompt_cache_size=3)
    model, encoded = pipe._engine.runner._model, []
    encode_prompt = pipe.encode_prompt
    pipe.encode_prompt = lambda prompt, **kwargs: encoded.append(list(prompt)) or encode_prompt(prompt, **kwargs)
    rows = [
        row
        for prompt in ("a ring", "a star", "a ring")
        for row in pipe._make_request(prompt, negative_prompt=" ", height=64, width=64).rows
    ]
    with torch.no_grad():
        model.prepare_encode(rows)
        assert encoded == [[" "], ["a ring", "a star"]]  # newcomers of one length together, each prompt once
        assert rows[0].text is rows[2].text
        model.prepare_encode(list(pipe._make_request("a ring", height=64, width=64).rows))
        assert len(encoded) == 2
        model.prepare_encode(list(pipe._make_request("a cross", height=64, width=64).rows))
        model.prepare_encode(list(pipe._make_request("a heart", height=64, width=64).rows))
    assert len(model._prompts) == 3
    del pipe.encode_prompt


def test_an_embedding_does_not_depend_on_its_neighbours(pipe):
    model = pipe.init_continuous_batching().runner._model
    with torch.no_grad():
        (alone,) = model._encode(["a ring"], 512)
        beside, _ = model._encode(["a ring", "a red star on a blue background " * 12], 512)
    assert beside.embeds.shape == alone.embeds.shape
    assert torch.equal(beside.embeds, alone.embeds)


@pytest.mark.parametrize("prompt", ["", "a ring", "ünïcödé 🦊 " * 20, "x" * 5000])
def test_the_token_bound_holds_before_encoding(pipe, prompt):
    (row,), model = rows_and_model(pipe, {"prompt": prompt, "height": 64, "width": 64})
    bound = row.num_tokens
    with torch.no_grad():
        model.prepare_encode([row])
    assert row.num_tokens <= bound


def test_the_generators_of_rows_differ(pipe):
    (state, _) = rows_and_model(
        pipe,
        {"prompt": "a ring", "num_images_per_prompt": 3, "height": 64, "width": 64, "generator": generator(0)},
    )
    assert len({row.generator.initial_seed() for row in state}) == 3
