"""Decoding: the 2-D form equals the stock VAE, steps aside where it must, and rows of one size go together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from conftest import generator, load_stock
from diffusers_continuous import decode
from diffusers_continuous.decode import FrameDecoder, LatentPreview, decode_latents


def stock_decode(vae, z):
    return vae.decode(z[:, :, None], return_dict=False)[0][:, :, 0]


@pytest.mark.parametrize("temporal", [[False, False, False], [False, True, True]])
@torch.no_grad()
def test_the_2d_form_equals_the_stock_decoder(temporal):
    """On random weights of both kinds of VAE: the embedded one's, and Qwen-Image's with temporal upsampling."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=temporal
    ).eval()
    z = torch.randn(2, 16, 6, 9, generator=generator(0))
    assert (FrameDecoder()(vae, z) - stock_decode(vae, z)).abs().max() < 2e-5


@torch.no_grad()
def test_a_changed_weight_is_noticed():
    vae, decoder = load_stock().vae, FrameDecoder()
    z = torch.randn(1, 16, 8, 8, generator=generator(0))
    decoder(vae, z)
    vae.decoder.conv_out.weight.mul_(0.5)
    assert (decoder(vae, z) - stock_decode(vae, z)).abs().max() < 1e-5


@pytest.mark.parametrize("what", ["tiling", "a hook", "slicing", "bf16"])
@torch.no_grad()
def test_it_steps_aside_or_agrees_where_something_hangs_on_the_vae(what, monkeypatch):
    pipe = load_stock(torch.bfloat16 if what == "bf16" else torch.float32)
    calls = []
    decode_vae = pipe.vae.decode
    side = 128
    latents = torch.randn(2, (side // 16) ** 2, 64, generator=generator(0)).to(pipe.vae.dtype)
    if what == "tiling":
        pipe.vae.enable_tiling(96, 96, 64, 64)  # tiles of 96 pixels, one every 64
    elif what == "slicing":
        pipe.vae.enable_slicing()
    elif what == "a hook":
        pipe.vae.decoder.register_forward_hook(lambda *_: calls.append("hook"))
    monkeypatch.setattr(pipe.vae, "decode", lambda *a, **k: calls.append("decode") or decode_vae(*a, **k))
    ours = decode_latents(pipe, latents, side, side)
    assert ours.shape == (2, 3, side, side)
    assert ours.abs().max() <= 1
    assert ("hook" in calls) == (what == "a hook")
    assert ("decode" in calls) == (what in ("a hook", "tiling"))
    z = pipe._unpack_latents(latents, side, side, 8)
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1).to(z.dtype)
        for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    expected = torch.cat([stock_decode(pipe.vae, (row / (1.0 / std) + mean)[:, :, 0]) for row in z.split(1)]).clamp(
        -1, 1
    )
    if what != "bf16":
        assert (ours - expected).abs().max() < 1e-4
        return
    exact_vae = load_stock().vae  # bf16 has no right answer of its own: both are held against float32
    exact = torch.cat(
        [stock_decode(exact_vae, (row.float() * std.float() + mean.float())[:, :, 0]) for row in z.split(1)]
    )
    assert (ours - exact).pow(2).mean().sqrt() <= 1.1 * (expected - exact).pow(2).mean().sqrt()


def test_decodes_do_not_pile_up(pipe, monkeypatch):
    """Many pictures that finish together are decoded in pieces of at most MAX_CPU_DECODE_PIXELS on a CPU."""
    sizes = []
    original = decode._decode
    monkeypatch.setattr(decode, "_decode", lambda vae, z: sizes.append(len(z)) or original(vae, z))
    monkeypatch.setattr(decode, "MAX_CPU_DECODE_PIXELS", 3 * 64 * 64)
    call = {"prompt": "a ring", "height": 64, "width": 64, "num_inference_steps": 2, "true_cfg_scale": 1.0}
    images = pipe(**call, num_images_per_prompt=7).images
    assert len(images) == 7
    assert sizes == [3, 3, 1]


def test_rows_of_one_size_that_finish_together_decode_together(pipe):
    call = {"prompt": ["a ring", "a star"], "height": 64, "width": 64, "num_inference_steps": 2, "true_cfg_scale": 1.0}
    pipe(**call)
    decodes = [step for step in pipe._engine.stats().recent_steps if step.kind == "decode"]
    assert [len(step.request_ids) for step in decodes] == [2]


@torch.no_grad()
def test_the_preview_shows_the_colours_of_the_picture():
    """A plain picture's latents, through the linear map, come out in about its colour."""
    pipe, preview = load_stock(), LatentPreview()
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    for colour in ((0.9, 0.1, 0.1), (0.1, 0.2, 0.8), (0.95, 0.95, 0.95)):
        picture = (torch.tensor(colour).view(1, 3, 1, 1, 1) * 2 - 1).expand(1, 3, 1, 64, 96)
        z = (pipe.vae.encode(picture).latent_dist.mean - mean) / std
        packed = pipe._pack_latents(z[:, :, 0], 1, 16, 8, 12)[0]
        shown = np.asarray(preview.render(pipe, packed, 64, 96)) / 255
        assert shown.shape == (8, 12, 3)
        assert np.abs(shown[2:-2, 2:-2].mean((0, 1)) - colour).max() < 0.15
