"""What a picture costs by formula with the released networks, as they are used: arithmetic, bytes and weights."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

import pid_costs as costs
from diffusers_continuous.pid import PiDTransformer2DModel
from diffusers_continuous.pid.memory import estimate_decode_bytes

TARGETS = (2048, 4096)  # sides of pictures in pixels
STEPS, EARLY_STOP, DECODE_STEPS = 50, 6, 4
TEXT_TOKENS, CAPTION_TOKENS = 64, 300
ENCODED_TOKENS = 530  # what Gemma reads for a caption: its instruction, about 230, and the 300
NUM_CHUNKS = 8  # in what is called "in chunks"
ITEMSIZE = 2  # bytes of a bfloat16


@cache
def full_size_networks() -> dict[str, torch.nn.Module]:
    """The released networks without weights: a configuration and a count of parameters each."""
    with torch.device("meta"):
        return {
            "transformer": QwenImageTransformer2DModel(num_layers=60),
            "vae_decoder": AutoencoderKLQwenImage(),
            "pid": PiDTransformer2DModel(),
        }


def count_parameters() -> dict[str, int]:
    """Parameters of each released network; of the VAE, its decoder's."""
    networks = full_size_networks()
    networks = {**networks, "vae_decoder": networks["vae_decoder"].decoder}
    return {name: sum(parameter.numel() for parameter in net.parameters()) for name, net in networks.items()}


def formula_table() -> dict[str, Any]:
    """Arithmetic and bytes of the released networks, by target size."""
    config = {name: net.config for name, net in full_size_networks().items()}
    weights = {name: count * ITEMSIZE for name, count in count_parameters().items()}
    table: dict[str, Any] = {str(target): _formulas(config, target) for target in TARGETS}
    return {**table, "weights_bytes": weights}


def _formulas(config: dict[str, Any], target: int) -> dict[str, Any]:
    pid = config["pid"]
    small = target // pid.sr_scale
    step, small_step = (
        2 * costs.transformer_flops(config["transformer"], costs.image_tokens(side, side), TEXT_TOKENS)
        for side in (target, small)
    )
    vae, decode, chunked = costs.vae_flops(config["vae_decoder"], target, target), *_pid_flops(pid, target)
    bytes_ = _formula_bytes(config, target, small)
    caption, few = costs.caption_flops(ENCODED_TOKENS), STEPS - EARLY_STOP
    whole = {
        "vae": {"flops": STEPS * step + vae, "peak_bytes": max(bytes_["step"], bytes_["vae"])},
        "pid": {"flops": few * small_step + caption + decode, "peak_bytes": max(bytes_["small_step"], bytes_["pid"])},
        "pid_in_chunks": {
            "flops": few * small_step + caption + chunked,
            "peak_bytes": max(bytes_["small_step"], bytes_["pid_in_chunks"]),
        },
    }
    vae_small = costs.vae_flops(config["vae_decoder"], small, small)
    flops = {"step": step, "small_step": small_step, "vae_small": vae_small}
    flops |= {"pid": decode, "pid_in_chunks": chunked, "vae": vae}
    return {
        "end_to_end": whole,
        "parts": {name: {"flops": flops[name], "peak_bytes": bytes_[name]} for name in flops},
        "flops_ratio": whole["pid"]["flops"] / whole["vae"]["flops"],
        "memory_ratio": whole["pid"]["peak_bytes"] / whole["vae"]["peak_bytes"],
        "chunked_memory_ratio": whole["pid_in_chunks"]["peak_bytes"] / whole["vae"]["peak_bytes"],
    }


def _pid_flops(pid: Any, target: int) -> tuple[int, int]:
    """A decode at once, and in chunks."""
    patches = (target // pid.patch_size) ** 2
    adapter, heads = costs.pid_adapter_flops(pid, patches), costs.pid_heads_flops(pid, patches)
    step, chunked = (costs.pid_step_flops(pid, patches, CAPTION_TOKENS, in_chunks) for in_chunks in (False, True))
    return adapter + heads + DECODE_STEPS * step, adapter + DECODE_STEPS * chunked


def _formula_bytes(config: dict[str, Any], target: int, small: int) -> dict[str, int]:
    pid = config["pid"]
    chunk = (target // pid.patch_size) ** 2 // NUM_CHUNKS
    step = partial(costs.transformer_bytes, config["transformer"], text_tokens=TEXT_TOKENS, itemsize=ITEMSIZE)
    return {
        "step": step(costs.image_tokens(target, target)),
        "small_step": step(costs.image_tokens(small, small)),
        "vae": costs.vae_bytes(config["vae_decoder"], target, target, ITEMSIZE),
        "vae_small": costs.vae_bytes(config["vae_decoder"], small, small, ITEMSIZE),
        "pid": estimate_decode_bytes(pid, target, target, 1, ITEMSIZE, None),
        "pid_in_chunks": estimate_decode_bytes(pid, target, target, 1, ITEMSIZE, chunk),
    }
