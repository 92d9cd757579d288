"""The embedded tiny Qwen-Image: small, loaded and drawn by the unchanged stock pipeline, and judged honestly."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "src/diffusers_continuous/assets/tiny-qwen-image"
UNICODE = ["a red circle", "Füße, naïve", "日本語の絵 🎉👩‍🚀", "\x00\t\n\u2028", "ﷺ ꙮ \U0010fffd", ""]

sys.path.insert(0, str(ROOT / "scripts"))
judge = importlib.import_module("judge_prompt_following")
scenes = importlib.import_module("tiny_scenes")
tiny_vae = importlib.import_module("tiny_vae")
train = importlib.import_module("train_tiny_qwen_image")


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: QwenImagePipeline, prompts: list[str], seed: int, num_inference_steps: int = 10) -> np.ndarray:
    return pipeline(
        prompts,
        negative_prompt=[" "] * len(prompts),
        width=128,
        height=128,
        num_inference_steps=num_inference_steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images


# the folder


def test_folder_holds_at_most_20_mb_and_only_safetensors() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    assert {path.suffix for path in files} <= {".json", ".md", ".safetensors"}


def test_plain_load_gives_the_stock_classes_in_float32(pipeline: QwenImagePipeline) -> None:
    names = {name: type(part).__name__ for name, part in pipeline.components.items()}
    assert names == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    }
    assert {pipeline.text_encoder.dtype, pipeline.transformer.dtype, pipeline.vae.dtype} == {torch.float32}


def test_template_prefix_has_the_34_tokens_the_pipeline_drops(pipeline: QwenImagePipeline) -> None:
    prefix, _ = pipeline.prompt_template_encode.split("{}")
    prefix_ids = pipeline.tokenizer(prefix).input_ids
    assert len(prefix_ids) == pipeline.prompt_template_encode_start_idx == 34
    for text in UNICODE:
        ids = pipeline.tokenizer(pipeline.prompt_template_encode.format(text)).input_ids
        assert ids[:34] == prefix_ids


@pytest.mark.parametrize("text", UNICODE)
def test_any_text_is_tokenized_without_loss(pipeline: QwenImagePipeline, text: str) -> None:
    ids = pipeline.tokenizer(text).input_ids
    assert pipeline.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


# the scenes and the judge


def test_training_never_sees_what_is_held_out() -> None:
    rng = random.Random(0)
    assert not any(scenes.is_held_out(scenes.sample_scene(rng)) for _ in range(500))
    assert all(scenes.is_held_out(scenes.sample_scene(rng, split="test")) for _ in range(500))


def test_scene_is_the_same_picture_at_four_times_the_resolution() -> None:
    rng = random.Random(0)
    for _ in range(8):
        scene = scenes.sample_scene(rng)
        large = scenes.render(scene, 512, 512).reshape(128, 4, 128, 4, 3).mean((1, 3))
        # 16 rows are sampled in a pixel, so a level edge may be off by 1/32 of a pixel: 8 levels of 255
        assert np.abs(large - scenes.render(scene, 128, 128)).max() <= 8


@pytest.mark.parametrize(("width", "height"), [(96, 96), (128, 128), (128, 192), (256, 256)])
def test_judge_is_right_about_true_renderings(width: int, height: int) -> None:
    for scene in judge.held_out_scenes(12, width, height, seed=0):
        verdict = judge.compare(scene, judge.look_at(scenes.render(scene, width, height)))
        assert verdict.is_all_right, scenes.caption(scene)


def test_judge_rejects_another_caption_and_an_empty_picture() -> None:
    star = scenes.SceneObject("star", "red", 0.25, 0.5, 0.4)
    ring = scenes.SceneObject("ring", "white", 0.75, 0.5, 0.4)
    scene = scenes.Scene("blue", (star, ring), relation="to the left of")
    swapped = judge.look_at(scenes.render(scenes.Scene("blue", (ring, star), relation="to the right of"), 128, 128))
    assert judge.compare(scene, swapped).is_all_right
    mirrored = judge.look_at(scenes.render(scene, 128, 128)[:, ::-1])
    assert judge.compare(scene, mirrored).is_object_right == (False, False)
    empty = judge.look_at(np.full((128, 128, 3), scenes.COLORS["blue"], np.uint8))
    assert judge.compare(scene, empty).is_background_right
    assert judge.compare(scene, empty).is_object_right == (False, False)


def test_judge_forgives_a_thorn_but_takes_no_shape_for_another() -> None:
    for kind in scenes.KINDS:
        scene = scenes.Scene("white", (scenes.SceneObject(kind, "blue", 0.5, 0.5, 0.6),))
        picture = scenes.render(scene, 128, 128)
        left = np.nonzero((picture != scenes.COLORS["white"]).any(-1))[1].min()
        picture[60:65, left - 10 : 64] = scenes.COLORS["blue"]
        (thorny,) = judge.look_at(picture).objects
        assert thorny.kind == kind
    bar = np.full((128, 128, 3), scenes.COLORS["white"], np.uint8)
    bar[50:78, 8:120] = scenes.COLORS["blue"]
    (formless,) = judge.look_at(bar).objects
    assert formless.kind is None


# the pictures


def test_vae_reconstructs_held_out_scenes_to_30_db() -> None:
    truth = [scenes.render(scene, 128, 128) for scene in judge.held_out_scenes(8, 128, 128, seed=1)]
    assert judge.psnr(judge.reconstruct(MODEL, truth), truth) >= 30


def test_pictures_show_what_their_captions_say(pipeline: QwenImagePipeline) -> None:
    """A small sample of what scripts/judge_prompt_following.py measures, whose results are in the model card."""
    held_out = judge.held_out_scenes(20, 128, 128, seed=2)
    images = draw(pipeline, [scenes.caption(scene) for scene in held_out], seed=0, num_inference_steps=20)
    seen = [judge.look_at((image * 255).round().astype(np.uint8)) for image in images]
    result = judge.summarize(held_out, [judge.compare(*pair) for pair in zip(held_out, seen, strict=True)])
    assert result["background"] == 100
    assert result["object_color"] >= 95
    assert result["all"] >= 60


def test_seeds_give_different_pictures_and_one_seed_the_same(pipeline: QwenImagePipeline) -> None:
    prompt = ["a red star on a blue background"]
    first, again, other = (draw(pipeline, prompt, seed, num_inference_steps=4) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


# the training computes what the stock classes compute


def test_planar_autoencoder_equals_the_stock_one_for_one_frame() -> None:
    vae = AutoencoderKLQwenImage.from_pretrained(MODEL, subfolder="vae").eval()
    planar = tiny_vae.PlanarAutoencoder(vae)
    images = tiny_vae.sample_crops(random.Random(0), 64, 2)
    with torch.no_grad():
        mean, _ = planar.encode(images)
        stock = vae.encode(images[:, :, None]).latent_dist.mean
        decoded = vae.decode(stock).sample[:, :, 0]
        # float32, another order of sums
        torch.testing.assert_close(mean, stock[:, :, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(planar.decode(mean).clamp(-1, 1), decoded, atol=1e-4, rtol=0)


def test_training_forward_equals_the_stock_pipeline_forward(pipeline: QwenImagePipeline) -> None:
    denoiser = train.Denoiser(pipeline.tokenizer, pipeline.text_encoder, pipeline.transformer)
    captions = ["a red star to the left of a blue ring on a white background.", " "]
    noisy, sigma = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        token_ids, mask = denoiser.tokenize(captions)
        embeds, stock_mask = pipeline.encode_prompt(captions)
        stock = pipeline.transformer(
            hidden_states=noisy,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=stock_mask,
            timestep=sigma,
            img_shapes=[[(1, 8, 8)]] * 2,
            return_dict=False,
        )[0]
        own = denoiser(noisy, sigma, token_ids, mask, *denoiser.rotary(128, 128))
        own_embeds = denoiser.encode(token_ids)
    # float32, another order of sums; where the mask is False anything may stand
    torch.testing.assert_close(own_embeds[mask], embeds[stock_mask.bool()], atol=1e-4, rtol=0)
    torch.testing.assert_close(own, stock, atol=1e-4, rtol=0)
