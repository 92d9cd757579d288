"""The Pixel Diffusion Decoder against recorded runs of NVIDIA's reference, and the promises that are our own.

`data/pid/manifest.json` lists nets, cases and tolerances. Weights are bfloat16 values, used as float32.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

from diffusers_continuous import pid
from diffusers_continuous.errors import ConfigError, RequestError, StepFailedError
from diffusers_continuous.pid import checkpoints, conversion, layers, tables, text_encoding
from diffusers_continuous.pid.adapter import LatentFeatures, PiDGate, PiDLatentAdapter
from diffusers_continuous.pid.checkpoints import CHECKPOINTS, find_checkpoint
from diffusers_continuous.pid.modeling import PatchCutter, PiDTransformer2DModel
from diffusers_continuous.pid.pipeline import PiDDecoder
from diffusers_continuous.pid.scheduling import PiDScheduler

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
PeakBytes = importlib.import_module("benchmarking").PeakBytes

DATA = Path(__file__).parent / "data" / "pid"
MANIFEST = json.loads((DATA / "manifest.json").read_text())
CASES = {case["name"]: case for case in MANIFEST["cases"]}
SAMPLERS = {run["name"]: run for run in MANIFEST["samplers"]}
MODULE_TOLERANCE = 1e-5

# Diffusers' multistep solver hands tensors to numpy in a way that numpy 2 wants to see changed.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


# ---------------------------------------------------------------------- recorded nets and cases


def recipe_weights(shapes: dict[str, list[int]], seed: int) -> dict[str, torch.Tensor]:
    """Weights that are too large to store: normal numbers in sorted order of names, scaled and shifted by kind."""
    stream = np.random.RandomState(seed)  # its numbers are the same in every version of numpy
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name]
        n = np.asarray(stream.standard_normal(shape if shape else None), dtype=np.float32)
        shift, scale = _recipe(name, shape)
        value = np.float32(shift) + np.float32(scale) * n
        weights[name] = torch.from_numpy(np.asarray(value, np.float32)).to(torch.bfloat16)
    return weights


def _recipe(name: str, shape: list[int]) -> tuple[float, float]:
    if name.endswith("log_alpha"):
        return math.log(5.0), 0.3
    if name.endswith("y_pos_embedding"):
        return 0.0, 0.5
    if name.endswith("content_proj.bias"):
        return 0.5, 0.3
    if name.endswith("bias"):
        return 0.0, 0.1
    if len(shape) == 1:
        return 1.0, 0.2
    return 0.0, 1.0 / math.sqrt(math.prod(shape[1:]))


def digest(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over sorted names and their bytes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()


@functools.cache
def official_weights(name: str) -> dict[str, torch.Tensor]:
    """A recorded net's tensors under their official names, bfloat16."""
    net = MANIFEST["nets"][name]
    if net["weights"] is None:
        weights = recipe_weights(net["shapes"], net["recipe_seed"])
    else:
        weights = load_file(DATA / net["weights"])
    assert digest(weights) == net["digest"]
    return weights


@functools.cache
def recorded_net(name: str) -> PiDTransformer2DModel:
    """A recorded net in float32. Shared: do not change it."""
    weights = {key: tensor.float() for key, tensor in official_weights(name).items()}
    return PiDTransformer2DModel.from_original(weights, **MANIFEST["nets"][name]["config"])


@functools.cache
def recorded_case(name: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / CASES[name]["file"])


def inputs_of(case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of `forward`, in its order."""
    return [case[f"in.{key}"] for key in ("x", "t", "y", "lq_latent", "degrade_sigma")]


def max_error(ours: torch.Tensor, recorded: torch.Tensor) -> float:
    assert ours.shape == recorded.shape
    return (ours.double() - recorded.double()).abs().max().item()


# ---------------------------------------------------------------------- the network


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_network_repeats_the_recorded_outputs(name):
    case = recorded_case(name)
    sample = recorded_net(CASES[name]["net"])(*inputs_of(case)).sample
    assert max_error(sample, case["out.f32"]) <= CASES[name]["tol_maxabs"]


def watch_everything(net: PiDTransformer2DModel, seen: dict[str, torch.Tensor], idx: torch.Tensor) -> list[Any]:
    """Hooks that record what goes through the modules, under the recorded names."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[idx]

    def patch_block(i: int) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            seen[f"patch_block.{i}.in_img"], seen[f"patch_block.{i}.in_txt"] = args[0].clone(), args[1]
            seen[f"patch_block.{i}.out_img"], seen[f"patch_block.{i}.out_txt"] = out

        return hook

    def pixel_stage(_: Any, args: Any, out: Any) -> None:
        seen["pixel_embed.sel"], seen["pixel_cond"] = rows(args[1]), args[2].flatten(0, 1)

    def adapter(_: Any, args: Any, out: LatentFeatures) -> None:
        seen["lq.latent_feature"] = out.trunk.transpose(1, 2).unflatten(2, out.grid)
        seen.update({f"lq.token_feature.{i}": head for i, head in enumerate(out.heads)})
        seen["lq.pit_token_feature"] = out.heads[-1]

    def keep(name: str, pick: Any = lambda out: out) -> Any:
        return lambda _, args, out: seen.__setitem__(name, pick(out))

    hooks = [
        net.t_embedder.register_forward_hook(keep("t_emb")),
        net.s_embedder.register_forward_hook(keep("patch_embed")),
        net.lq_proj.register_forward_hook(adapter),
        net.lq_proj.latent_proj.register_forward_hook(lambda _, a, o: seen.__setitem__("lq.aligned_latent", a[0])),
        net.final_layer.register_forward_hook(keep("final_tokens.sel", rows)),
    ]
    hooks += [block.register_forward_hook(patch_block(i)) for i, block in enumerate(net.patch_blocks)]
    for i, block in enumerate(net.pixel_blocks):
        hooks.append(block.register_forward_hook(keep(f"pixel_block.{i}.out.sel", rows)))
        hooks.append(block.attn.register_forward_hook(keep(f"pixel_block.{i}.attn_out")))
    hooks.append(net.pixel_blocks[0].register_forward_hook(pixel_stage))
    if net.pit_lq_gate is not None:
        hooks.append(net.pit_lq_gate.register_forward_hook(lambda _, a, o: seen.update(cond_before_pit_gate=a[0])))
    return hooks


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_network_repeats_everything_in_between(name):
    case, net = recorded_case(name), recorded_net(CASES[name]["net"])
    seen: dict[str, torch.Tensor] = {}
    hooks = watch_everything(net, seen, case["patch_idx"])
    try:
        net(*inputs_of(case))
    finally:
        for hook in hooks:
            hook.remove()
    recorded = {key.removeprefix("mid."): value for key, value in case.items() if key.startswith("mid.")}
    assert len(recorded) > 15
    for key, value in recorded.items():
        # A hundred times what float32 rounding does here, a hundredth of what a wrong rule would.
        assert max_error(seen[key], value) <= 1e-4 * max(1.0, value.abs().max().item()), key


@pytest.mark.parametrize("kind", ["sigma_aware_per_token", "sigma_aware_per_token_per_dim"])
@torch.no_grad()
def test_gates_repeat_the_recorded_values(kind):
    data = {key.removeprefix(f"{kind}/"): v for key, v in load_file(DATA / "module_gates.safetensors").items()}
    gate = PiDGate(data["x"].shape[-1], kind)
    gate.load_state_dict({key[2:]: value.float() for key, value in data.items() if key.startswith("w.")})
    args = data["x"], data["lq"], data["sigma"]
    assert max_error(gate.openness(*args), data["gate"]) <= MODULE_TOLERANCE
    assert max_error(gate(*args), data["out"]) <= MODULE_TOLERANCE


PROJECTIONS = next(module for module in MANIFEST["modules"] if module["name"] == "lq_projection")["variants"]


@pytest.mark.parametrize("name", PROJECTIONS)
@torch.no_grad()
def test_the_adapter_repeats_every_recorded_alignment(name):
    options = dict(PROJECTIONS[name])
    grid, ratio = tuple(options.pop("grid")), options.pop("ratio")
    adapter = PiDLatentAdapter(**options, has_pit_head=True)
    assert adapter.ratio == ratio
    stored = load_file(DATA / "module_lq_projection.safetensors")
    data = {key.removeprefix(f"{name}/"): value for key, value in stored.items() if key.startswith(f"{name}/")}
    adapter.load_state_dict({key[2:]: value.float() for key, value in data.items() if key.startswith("w.")})
    features = adapter(data["latent"], grid, torch.float32, with_heads=True)
    assert max_error(adapter.align(data["latent"], grid), data["aligned"]) <= MODULE_TOLERANCE
    assert max_error(features.trunk.transpose(1, 2).unflatten(2, grid), data["feature"]) <= MODULE_TOLERANCE
    for key, head in zip(("token.0", "token.1", "token.pit"), features.heads, strict=True):
        assert max_error(head, data[key]) <= MODULE_TOLERANCE


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", [name for name in MANIFEST["tables"] if name.startswith("rope2d")])
def test_image_rotary_tables(name):
    table, data = MANIFEST["tables"][name], load_file(DATA / "tables.safetensors")
    grid, reference = (table["grid_h"], table["grid_w"]), (table["ref_h"], table["ref_w"])
    rows = data.get(f"{name}.idx", slice(None))
    for ours, which in zip(tables.image_rotary(grid, reference, table["head_dim"]), ("cos", "sin"), strict=True):
        assert max_error(ours[rows], data[f"{name}.{which}"]) <= 1e-6


def test_other_tables():
    data = load_file(DATA / "tables.safetensors")
    text = MANIFEST["tables"]["rope_text"]
    for ours, which in zip(tables.text_rotary(text["length"], text["head_dim"]), ("cos", "sin"), strict=True):
        assert max_error(ours[data["rope_text.idx"]], data[f"rope_text.{which}"]) <= 1e-6
    rotary = tables.image_rotary((5, 7), (128, 128), 64)
    assert max_error(tables.apply_rotary(data["rope_apply.q"], rotary), data["rope_apply.q_out"]) <= 1e-5
    assert max_error(tables.time_features(data["time_embed.t"]), data["time_embed"]) <= 1e-6


def test_pixel_positions_are_absolute_and_columns_come_first():
    expected = load_file(DATA / "tables.safetensors")["pixel_pos"]
    height, width, features = expected.shape
    rows, columns = (tables.pixel_positions(n, features // 2) for n in (height, width))
    joined = torch.cat([columns[None].expand(height, -1, -1), rows[:, None].expand(-1, width, -1)], -1)
    assert max_error(joined, expected) <= 1e-12
    cutter = PatchCutter(torch.zeros(1, 3, height, width), 2)
    cut = cutter.positions(slice(0, cutter.num_patches), cutter.axes(features))
    picture = PatchCutter(torch.zeros(1, features, height, width), 2).join(cut[None])
    assert max_error(picture[0].permute(1, 2, 0), expected) <= 1e-6


# ---------------------------------------------------------------------- chunks, bytes, dtypes


@pytest.mark.parametrize("name", ["qwen_override", "flux_v1_wide", "sr8", "flux2"])
@torch.no_grad()
def test_chunks_change_nothing_but_rounding(name):
    case, net = recorded_case(name), recorded_net(CASES[name]["net"])
    whole = net(*inputs_of(case), return_dict=False)[0]
    num_patches = CASES[name]["H"] * CASES[name]["W"] // net.config.patch_size**2
    for chunk in (1, 2, 3, 5, num_patches // 2, num_patches - 1, num_patches, num_patches + 1):
        chunked = net(*inputs_of(case), return_dict=False, chunk=chunk)[0]
        assert max_error(chunked, whole) <= 2e-5, chunk


@torch.no_grad()
def test_chunked_patch_stage_changes_nothing_but_rounding(monkeypatch):
    """Only pictures of more than 256 patches have their patch stage divided; here the limit is lower."""
    from diffusers_continuous.pid import memory

    case, net = recorded_case("wide"), recorded_net("wide_v15")
    whole = net(*inputs_of(case), return_dict=False)[0]
    monkeypatch.setattr(memory, "MIN_TOKEN_CHUNK", 5)
    assert max_error(net(*inputs_of(case), return_dict=False, chunk=2)[0], whole) <= 2e-5


@pytest.mark.parametrize("name", ["qwen_tall", "flux_v1_wide"])
@torch.no_grad()
def test_features_are_made_once_and_serve_every_step(name):
    case, net = recorded_case(name), recorded_net(CASES[name]["net"])
    x, t, y, latents, sigma = inputs_of(case)
    whole = net(x, t, y, latents, sigma).sample
    for with_heads in (True, False):
        features = net.encode_latents(latents, *x.shape[2:], with_heads=with_heads)
        assert max_error(net(x, t, y, features, sigma).sample, whole) <= 2e-6
    rows = [net.encode_latents(row[None], *x.shape[2:]) for row in latents]
    # One row's convolutions take another kernel than two rows'.
    assert max_error(net(x, t, y, LatentFeatures.stack(rows), sigma).sample, whole) <= CASES[name]["tol_maxabs"]


PEAK_CONFIG = {
    "hidden_size": 48,
    "num_groups": 4,
    "patch_depth": 3,
    "pixel_hidden_size": 8,
    "pixel_attn_hidden_size": 32,
    "pixel_num_groups": 2,
    "txt_embed_dim": 24,
    "txt_max_length": 20,
    "lq_hidden_dim": 32,
    "rope_ref_h": 128,
    "rope_ref_w": 128,
}
WIDE_CONFIG = {**PEAK_CONFIG, "hidden_size": 192, "pixel_hidden_size": 4, "pixel_attn_hidden_size": 160}


def measure(net: PiDTransformer2DModel, size: tuple[int, int], batch: int, chunk: int | None) -> PeakBytes:
    """One step from latents under the watch."""
    scale = net.spatial_scale
    x, t = torch.randn(batch, 3, *size), torch.full((batch,), 500.0)
    y = torch.randn(batch, 20, net.config.txt_embed_dim)
    latents = torch.randn(batch, net.config.lq_latent_channels, size[0] // scale, size[1] // scale)
    with torch.no_grad(), PeakBytes((x, y, latents), net.parameters()) as watch:
        net(x, t, y, latents, 0.2, chunk=chunk)
    return watch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "size", "batch", "chunks"),
    [
        (PEAK_CONFIG, (128, 96), 2, (None, 16, 4, 1)),
        (PEAK_CONFIG, (64, 256), 1, (None, 16, 4, 1)),
        (WIDE_CONFIG, (256, 288), 1, (None, 64, 24)),  # wide tokens, and so many that they are divided, too
    ],
)
def test_the_peak_falls_with_the_chunk_and_is_as_estimated(config, size, batch, chunks, dtype):
    net = PiDTransformer2DModel(**config).eval().to(dtype)
    peaks = []
    for chunk in chunks:
        peak = measure(net, size, batch, chunk).peak
        estimate = net.estimate_decode_bytes(*size, batch, dtype, chunk, text_length=20)
        assert abs(estimate / peak - 1) <= 0.15, (chunk, estimate, peak)
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 3


def test_in_chunks_no_tensor_has_all_hidden_pixels_or_all_modulations():
    net = PiDTransformer2DModel(**PEAK_CONFIG).eval()
    (height, width), itemsize = (128, 256), 4
    hidden_pixels = height * width * 4 * net.config.pixel_hidden_size * itemsize
    assert measure(net, (height, width), 1, None).largest >= hidden_pixels
    assert measure(net, (height, width), 1, 8).largest <= hidden_pixels / 8


@torch.no_grad()
def test_the_estimate_holds_at_full_size(monkeypatch):
    """2048 x 2048 in bfloat16 on the meta device, where attention must be stood in for."""
    with torch.device("meta"):
        net = PiDTransformer2DModel().eval().to(torch.bfloat16)
        inputs = torch.empty(1, 3, 2048, 2048), torch.empty(1, 300, 2304), torch.empty(1, 16, 64, 64)
    monkeypatch.setattr(layers, "attend", lambda qkv: torch.empty_like(qkv[:, :, 0].flatten(2)))
    with PeakBytes(inputs, net.parameters()) as watch:
        x, y, latents = inputs
        net(x, torch.empty(1, device="meta"), y, latents, torch.empty(1, device="meta"), chunk=4096)
    estimate = net.estimate_decode_bytes(2048, 2048, 1, torch.bfloat16, 4096)
    assert abs(estimate / watch.peak - 1) <= 0.15
    assert watch.largest < 2048 * 2048 * 64 * 2 / 2
    assert estimate < net.estimate_decode_bytes(2048, 2048, 1, torch.bfloat16) / 3


@torch.no_grad()
def test_a_byte_budget_chooses_the_chunk():
    case, net = recorded_case("qwen_ref"), recorded_net("qwen_v15")
    whole = net(*inputs_of(case)).sample
    enough, least = (net.estimate_decode_bytes(96, 96, chunk=chunk) for chunk in (None, 1))
    assert net.choose_chunk(96, 96, 1, enough) is None
    assert net.choose_chunk(96, 96, 1, enough - 1) == 18
    assert max_error(net(*inputs_of(case), max_bytes=enough // 3).sample, whole) <= 2e-5
    with pytest.raises(RequestError, match=f"{least:,}"):
        net(*inputs_of(case), max_bytes=least // 2)


@pytest.mark.parametrize("name", ["qwen_wide", "flux_v1_ref"])
@torch.no_grad()
def test_bfloat16_weights_keep_the_sensitive_parts_in_float32(name):
    case = recorded_case(name)
    config = MANIFEST["nets"][CASES[name]["net"]]["config"]
    net = PiDTransformer2DModel.from_original(dict(official_weights(CASES[name]["net"])), **config)
    assert net.dtype == torch.bfloat16
    streams = {}
    net.patch_blocks[1].register_forward_hook(lambda _, args, out: streams.update(image=out[0], text=out[1]))
    net.pixel_blocks[0].register_forward_hook(lambda _, args, out: streams.update(pixels=out))
    net.lq_proj.gate_modules[0].register_forward_hook(lambda _, args, out: streams.update(gated=out))
    sample = net(*inputs_of(case)).sample
    assert {stream.dtype for stream in streams.values()} == {torch.float32}
    # The reference under bfloat16 autocast is off by 0.017 rms where the output's deviation is 1.25.
    assert (sample - case["out.f32"]).pow(2).mean().sqrt() <= 0.02 * case["out.f32"].std()


def test_gradients_reach_every_parameter_that_the_picture_depends_on():
    net = PiDTransformer2DModel(**PEAK_CONFIG)
    x, y, latents = torch.randn(2, 3, 32, 64), torch.randn(2, 5, 24), torch.randn(2, 16, 1, 2)
    net(x, torch.tensor([100.0, 900.0]), y, latents, torch.tensor([0.0, 0.5])).sample.square().mean().backward()
    last = len(net.patch_blocks) - 1
    unused = tuple(f"patch_blocks.{last}.{part}" for part in ("attn.proj_y", "norm_y2", "mlp_y"))
    for name, parameter in net.named_parameters():
        assert (parameter.grad is None) == name.startswith(unused), name
    with pytest.raises(RequestError, match="no_grad"):
        net(x, 1.0, y, latents, 0.0, chunk=1)


def fresh_net() -> tuple[PiDTransformer2DModel, list[torch.Tensor], torch.Tensor]:
    """A net that may be changed, inputs, and what it makes of them."""
    weights = {key: tensor.float() for key, tensor in official_weights("qwen_v15").items()}
    net = PiDTransformer2DModel.from_original(weights, **MANIFEST["nets"]["qwen_v15"]["config"])
    case = recorded_case("qwen_tall")
    return net, inputs_of(case), recorded_net("qwen_v15")(*inputs_of(case)).sample


def assert_all_ways_work(net: PiDTransformer2DModel, inputs: list[torch.Tensor], expected: torch.Tensor) -> None:
    """Whole, in chunks, and from features of both kinds."""
    x, t, y, latents, sigma = inputs
    for chunk in (None, 7):
        assert max_error(net(x, t, y, latents, sigma, chunk=chunk).sample, expected) <= 2e-5
        features = net.encode_latents(latents, *x.shape[2:], with_heads=chunk is None)
        assert max_error(net(x, t, y, features, sigma, chunk=chunk).sample, expected) <= 2e-5


@torch.no_grad()
def test_repeated_blocks_compile_without_a_break():
    net, inputs, expected = fresh_net()
    net.compile_repeated_blocks(backend="eager", fullgraph=True)
    try:
        assert_all_ways_work(net, inputs, expected)
    finally:
        torch.compiler.reset()


@torch.no_grad()
def test_sequential_offload_reaches_every_weight():
    """Accelerate keeps every weight on the meta device except while its own module is called."""
    net, inputs, expected = fresh_net()
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in net.parameters())
    assert_all_ways_work(net, inputs, expected)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@torch.no_grad()
def test_group_offload_reaches_every_weight(kind):
    net, inputs, expected = fresh_net()
    cpu = torch.device("cpu")
    net.enable_group_offload(
        cpu, cpu, offload_type=kind, **({"num_blocks_per_group": 1} if kind == "block_level" else {})
    )
    assert_all_ways_work(net, inputs, expected)


# ---------------------------------------------------------------------- the scheduler


@functools.cache
def sampler_data() -> dict[str, torch.Tensor]:
    return load_file(DATA / "sampler.safetensors")


def scheduler_of(name: str) -> PiDScheduler:
    run = SAMPLERS[name]
    kind = next(kind for kind in ("dpm", "ode", "sde") if kind in run["kind"] + "sde")
    if kind == "dpm":
        scheduler = PiDScheduler("dpmsolver++", shift=run["shift"])
        scheduler.set_timesteps(run["steps"])
    else:
        scheduler = PiDScheduler(kind, None) if name == "uniform3" else PiDScheduler(kind)
        scheduler.set_timesteps(1 if name == "single" else run.get("num_steps", 4))
    return scheduler


def run_network(name: str) -> torch.Tensor:
    """A recorded run with our network, in the end clamped."""
    data, scheduler, net = sampler_data(), scheduler_of(name), recorded_net("qwen_v15")
    x, scale = data[f"{name}/noise"], SAMPLERS[name].get("cfg_scale", 1.0)
    latents, sigma = data["cond.lq_latent"], data["cond.degrade_sigma"]
    for i, t in enumerate(scheduler.timesteps):
        v = net(x, t, data["cond.y"], latents, sigma).sample
        if scale != 1:
            v_null = net(x, t, data["cond.y_null"], latents, sigma).sample
            v = v_null + scale * (v - v_null)
        x = scheduler.step(v, t, x, noise=data.get(f"{name}/eps.{i}")).prev_sample
    return x


@pytest.mark.parametrize("name", ["sde4", "ode4", "sde3", "uniform3", "single", "dpm5_cfg3", "dpm3_cfg1", "dpm1_cfg1"])
@torch.no_grad()
def test_sampling_repeats_the_recorded_pictures(name):
    final = run_network(name)
    tolerance = 5e-3 if name.startswith("dpm") else 2e-3
    assert max_error(final, sampler_data()[f"{name}/final_unclamped"]) <= tolerance
    assert max_error(final.clamp(-1, 1), sampler_data()[f"{name}/final"]) <= tolerance


@pytest.mark.parametrize("name", ["sde4", "ode4"])
@torch.no_grad()
def test_each_step_repeats_the_recorded_velocity(name):
    data, net, scheduler = sampler_data(), recorded_net("qwen_v15"), scheduler_of(name)
    xs = [data[f"{name}/noise"], *(data[f"{name}/step.{i}.x"] for i in (1, 2, 3)), data[f"{name}/final_unclamped"]]
    for i, t in enumerate(scheduler.timesteps):
        assert t == data[f"{name}/step.{i}.t_net"].item()
        v = net(xs[i], t, data["cond.y"], data["cond.lq_latent"], data["cond.degrade_sigma"]).sample
        assert max_error(v, data[f"{name}/step.{i}.v"]) <= CASES["qwen_wide"]["tol_maxabs"]
        step = scheduler.step(data[f"{name}/step.{i}.v"], t, xs[i], noise=data.get(f"{name}/eps.{i}"))
        assert max_error(step.prev_sample, xs[i + 1]) <= 1e-6


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name.startswith("toy")])
def test_toy_runs_isolate_the_update_rules(name):
    data, scheduler, run = sampler_data(), scheduler_of(name), SAMPLERS[name]

    def velocity(x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * x.tanh() + 0.3 * y + 0.1 * (t / 1000) * x

    x, scale = data["toy.noise"], run.get("cfg_scale", 1.0)
    for i, t in enumerate(scheduler.timesteps):
        v, v_null = velocity(x, t, data["toy.y"]), velocity(x, t, data["toy.y_null"])
        eps = data[f"{name}/eps"][i] if "sde" in name and i < 3 else None
        x = scheduler.step(v_null + scale * (v - v_null), t, x, noise=eps).prev_sample
    assert max_error(x, data[f"{name}/final_unclamped"]) <= run.get("tol", 1e-5)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "dpm" in name])
def test_the_solver_visits_the_recorded_times(name):
    scheduler = scheduler_of(name)
    assert max_error(scheduler.sigmas, sampler_data()[f"{name}/timesteps"]) <= 1e-6
    assert scheduler.sigmas[-1] == 0
    recorded = SAMPLERS[name].get("net_times", [])[:: 2 if "cfg3" in name else 1]
    assert all(abs(t.item() - r) <= 1e-3 for t, r in zip(scheduler.timesteps, recorded, strict=bool(recorded)))


def test_few_steps_take_entries_of_the_list():
    scheduler, expected = PiDScheduler(), {1: [1.0, 0], 2: [0.999, 0.634, 0], 3: [0.999, 0.866, 0.342, 0]}
    for steps, times in expected.items():
        scheduler.set_timesteps(steps)
        assert scheduler.sigmas.tolist() == pytest.approx(times)
    for steps, reason in ((5, "twice"), (8, "twice"), (0, "at least 1")):
        with pytest.raises(RequestError, match=reason):
            scheduler.set_timesteps(steps)


def test_new_noise_comes_from_the_generator_and_everything_is_float32():
    scheduler, x = PiDScheduler(), torch.randn(2, 3, 4, 4)
    scheduler.set_timesteps(4)
    v = torch.randn_like(x).bfloat16()
    steps = [scheduler.step(v, 999.0, x, torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(steps[0].prev_sample, steps[1].prev_sample)
    assert steps[0].prev_sample.dtype == torch.float32
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    assert torch.equal(scheduler.step(v, 999.0, x, noise=noise).prev_sample, steps[0].prev_sample)
    per_row = scheduler.step(v, 999.0, x, [torch.Generator().manual_seed(k) for k in (1, 2)]).prev_sample
    alone = scheduler.step(v[1:], 999.0, x[1:], torch.Generator().manual_seed(2)).prev_sample
    assert torch.equal(per_row[1:], alone)


def test_the_scheduler_refuses_what_makes_no_sense(tmp_path):
    x = torch.zeros(1, 3, 4, 4)
    scheduler = PiDScheduler()
    with pytest.raises(RequestError, match="set_timesteps"):
        scheduler.step(x, 999.0, x)
    scheduler.set_timesteps(4)
    with pytest.raises(RequestError, match="500"):
        scheduler.step(x, 500.0, x)
    solver = PiDScheduler("dpmsolver++", None, shift_reference=2048)
    with pytest.raises(RequestError, match="height"):
        solver.set_timesteps(25)
    solver.set_timesteps(25, height=512, width=512)
    with pytest.raises(RequestError, match="in order"):
        solver.step(x, solver.timesteps[1], x)
    with pytest.raises(ConfigError, match="euler"):
        PiDScheduler("euler")
    with pytest.raises(ConfigError, match="fall to 0"):
        PiDScheduler(t_list=[0.1, 0.9, 0.0])


def test_the_solver_shift_grows_with_the_picture():
    plain, sized = PiDScheduler("dpmsolver++", None), PiDScheduler("dpmsolver++", None, shift_reference=2048)
    plain.set_timesteps(10)
    sized.set_timesteps(10, height=2048, width=2048)
    assert torch.equal(plain.sigmas, sized.sigmas)
    half = PiDScheduler("dpmsolver++", None, shift=3.0)
    half.set_timesteps(10)
    sized.set_timesteps(10, height=512, width=512)
    assert torch.allclose(half.sigmas, sized.sigmas)


def test_the_scheduler_survives_saving(tmp_path):
    for scheduler in (PiDScheduler("ode"), PiDScheduler("dpmsolver++", None, 4.0, 1024)):
        scheduler.save_pretrained(tmp_path)
        again = PiDScheduler.from_pretrained(tmp_path)
        for each in (scheduler, again):
            each.set_timesteps(3, height=64, width=96)
        assert torch.equal(scheduler.timesteps, again.timesteps)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("checkpoint", "file", "num_tensors"),
    [
        (find_checkpoint("qwenimage"), "keys_qwenimage_v1pt5.json", 461),
        (find_checkpoint("qwenimage", checkpoint_type="undistilled"), "keys_qwenimage_v1pt5.json", 461),
        (find_checkpoint("flux", "2k"), "keys_flux_v1.json", 456),
    ],
    ids=str,
)
def test_full_size_networks_have_the_official_names_and_shapes(checkpoint, file, num_tensors):
    official = json.loads((DATA / file).read_text())
    expected = {name: shape for name, shape in official.items() if not name.startswith(conversion.TRAINING_HEAD)}
    with torch.device("meta"):
        net = PiDTransformer2DModel(**checkpoint.config)
    assert {name: list(tensor.shape) for name, tensor in net.state_dict().items()} == expected
    assert len(expected) == num_tensors


# Parameters without the training head, which weighs 1,100,848.
PARAMETERS = {
    ("qwenimage", "2kto4k_v1pt5"): 1_400_199_315,
    ("flux", "2kto4k_v1pt5"): 1_400_199_315,
    ("flux2", "2kto4k_v1pt5"): 1_400_346_771,
    ("flux", "2k"): 1_362_348_170,
    ("flux2", "2k"): 1_362_864_266,
    ("sd3", "2k"): 1_362_348_170,
    ("sd3", "2kto4k"): 1_362_348_170,
    ("sdxl", "2kto4k"): 1_362_292_874,
    ("dinov2", "2k"): 1_365_813_386,
    ("siglip", "2k"): 1_367_582_858,
}


def test_every_checkpoint_has_the_documented_number_of_parameters():
    assert {(item.backbone, item.variant) for item in CHECKPOINTS} == set(PARAMETERS)
    for item in CHECKPOINTS:
        with torch.device("meta"):
            net = PiDTransformer2DModel(**item.config)
        assert sum(p.numel() for p in net.parameters()) == PARAMETERS[item.backbone, item.variant], item


def test_checkpoints_that_do_not_exist_are_refused_with_those_that_do():
    assert find_checkpoint("siglip", "2k").sr_scale == 8
    assert find_checkpoint("qwenimage-2512") == find_checkpoint("qwenimage")
    assert find_checkpoint("qwenimage").folder == "PiD_v1pt5_res2kto4k_sr4x_official_qwenimage_distill_4step"
    assert find_checkpoint("siglip", "2k").folder == "PiD_res2k_sr8x_official_siglip_distill_4step"
    with pytest.raises(ConfigError, match=r"(?s)There are:.*'2kto4k_v1pt5'.*'undistilled'"):
        find_checkpoint("qwenimage", "2k")
    with pytest.raises(ConfigError, match="sr_scale=4"):
        find_checkpoint("qwenimage", sr_scale=8)
    with pytest.raises(ConfigError, match=r"choose from .*'qwenimage'"):
        find_checkpoint("wan")


def official_file(net: str, path: Path, change: Any = None) -> Path:
    """A file as NVIDIA lays them out: `net.` before every name, beside networks that only training used."""
    tensors = {f"net.{name}": tensor for name, tensor in official_weights(net).items()}
    tensors |= {"net_ema.s_embedder.proj.bias": torch.zeros(2), "discriminator.head.weight": torch.zeros(2)}
    tensors |= {"fake_score.s_embedder.proj.bias": torch.zeros(2), "repa_loss.head.weight": torch.zeros(2)}
    if change is not None:
        change(tensors)
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def public(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


@pytest.mark.parametrize("net", ["qwen_v15", "flux_v1"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@torch.no_grad()
def test_an_official_file_becomes_our_network_and_survives_saving(net, suffix, tmp_path):
    has_head = net == "qwen_v15"
    assert any(conversion.TRAINING_HEAD in name for name in official_weights(net)) == has_head
    tensors = conversion.read_checkpoint(official_file(net, tmp_path / f"official{suffix}"))
    model = PiDTransformer2DModel.from_original(tensors, **MANIFEST["nets"][net]["config"])
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "ours")
    again = PiDTransformer2DModel.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert public(again.config) == public(model.config)
    case = next(case for case in CASES.values() if case["net"] == net)
    data = recorded_case(case["name"])
    assert max_error(again(*inputs_of(data)).sample, data["out.f32"]) <= case["tol_maxabs"]


def test_names_without_prefix_and_older_names_are_taken():
    bare = official_weights("flux_v1")
    for prefix in ("", "net.", "core.", "net.core."):
        assert conversion.convert_state_dict({prefix + name: t for name, t in bare.items()}).keys() == bare.keys()
    with pytest.raises(ConfigError, match="twice"):
        conversion.convert_state_dict({"net.y_pos_embedding": torch.zeros(1), "y_pos_embedding": torch.zeros(1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("net.pixel_blocks.1.mlp.fc2.bias"), "1 missing: pixel_blocks.1.mlp.fc2.bias"),
        (lambda t: t.update({"net.extra.weight": torch.zeros(1)}), "1 unexpected: extra.weight"),
        (lambda t: t.update({"net.final_layer.linear.bias": torch.zeros(4)}), r"final_layer.linear.bias \(4,\)"),
    ],
)
def test_a_file_that_does_not_fit_fails_loudly(change, message, tmp_path):
    tensors = conversion.read_checkpoint(official_file("qwen_v15", tmp_path / "official.pth", change))
    with pytest.raises(ConfigError, match=message):
        PiDTransformer2DModel.from_original(tensors, **MANIFEST["nets"]["qwen_v15"]["config"])


def test_a_file_of_the_other_family_is_named_as_such():
    tensors = dict(official_weights("flux_v1"))
    with pytest.raises(ConfigError, match="look like v1: gates per token and dimension, lq_hidden_dim=16, 6 channels"):
        PiDTransformer2DModel.from_original(tensors, **MANIFEST["nets"]["qwen_v15"]["config"])


def test_a_pickle_with_anything_but_tensors_is_refused(tmp_path):
    torch.save({"net.weight": torch.zeros(1), "epoch": 3}, tmp_path / "model.pth")
    with pytest.raises(ConfigError, match="flat table"):
        conversion.read_checkpoint(tmp_path / "model.pth")


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "notes.pth").write_text("not tensors")
    with pytest.raises(ConfigError, match=r"notes\.pth is no PyTorch checkpoint"):
        PiDDecoder.from_original(tmp_path / "notes.pth", backbone="qwenimage")


def test_a_repository_folder_is_searched_and_a_missing_file_named(tmp_path):
    checkpoint = find_checkpoint("flux", "2k")
    with pytest.raises(ConfigError, match=checkpoint.folder):
        conversion.locate_checkpoint(tmp_path, checkpoint)
    place = tmp_path / "checkpoints" / checkpoint.folder / checkpoints.FILE_NAME
    place.parent.mkdir(parents=True)
    place.touch()
    assert conversion.locate_checkpoint(tmp_path, checkpoint) == place
    assert conversion.locate_checkpoint(place, checkpoint) == place


@pytest.mark.parametrize("source", ["/no/such/folder", "./model", "weights/model.pth"])
def test_a_path_that_leads_nowhere_is_no_repository(source):
    with pytest.raises(ConfigError, match=f"'{source}' is not there"):
        conversion.locate_checkpoint(source, find_checkpoint("flux", "2k"))


def test_options_of_no_released_network_are_refused():
    with pytest.raises(ConfigError, match="rope_mode"):
        conversion.convert_config({"rope_mode": "linear"})
    with pytest.raises(ConfigError, match="hidden_sise"):
        conversion.convert_config({"hidden_sise": 8})
    assert conversion.convert_config({"lq_aux_rgb_head": True, "use_text_rope": True, "sr_scale": 8}) == {"sr_scale": 8}
    for wrong in ({"num_groups": 5}, {"pixel_hidden_size": 6}, {"lq_gate_type": "open"}):
        with pytest.raises(ConfigError):
            PiDTransformer2DModel(**{**PEAK_CONFIG, **wrong})


# ---------------------------------------------------------------------- captions


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words and single characters; every text begins with <bos>."""
    words = ["<pad>", "<bos>", "<unk>", "a", "red", "cat", "User", "Prompt", ":", "\n"]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>", padding_side="left"
    )


@functools.cache
def tiny_gemma(width: int = 24) -> Gemma2Model:
    """A random model of the reference's class. Shared: do not change it."""
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=width,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        num_hidden_layers=2,
        intermediate_size=32,
        vocab_size=16,
        pad_token_id=0,
    )
    return Gemma2Model(config).eval()


def test_the_instruction_is_the_one_that_decoders_were_trained_with():
    text = text_encoding.sana_instruction()
    expected = "62b9ab89eebb0ac5ee4d264bf96bf19d2b81f504bc3852500efeaf5a34d638b1"
    assert hashlib.sha256(text.encode()).hexdigest() == expected


@torch.no_grad()
def test_captions_keep_the_first_and_the_last_positions():
    tokenizer, gemma, instruction = tiny_tokenizer(), tiny_gemma(), "User Prompt : "
    ours = text_encoding.encode_captions(gemma, tokenizer, ["a red cat", ""], 6, instruction)
    # <bos> User Prompt : | a red cat | filling; 4 + 6 - 2 positions, of which 0 and the last 5 are kept.
    ids = torch.tensor([[1, 6, 7, 8, 3, 4, 5, 0], [1, 6, 7, 8, 0, 0, 0, 0]])
    hidden = gemma(ids, attention_mask=(ids != 0).long())[0]
    assert max_error(ours, hidden[:, [0, 3, 4, 5, 6, 7]]) <= 1e-6
    assert ours[:, -1].abs().min() > 0  # the filling is kept as it is
    assert ours.dtype == torch.float32
    alone = text_encoding.encode_captions(gemma, tokenizer, ["a red cat"], 6, instruction)
    assert max_error(alone, ours[:1]) <= 1e-5


@torch.no_grad()
def test_long_captions_are_cut_and_filling_is_hidden_from_the_caption():
    tokenizer, gemma, instruction = tiny_tokenizer(), tiny_gemma(), "User Prompt : "
    long = text_encoding.encode_captions(gemma, tokenizer, ["a red cat " * 50], 6, instruction)
    cut = text_encoding.encode_captions(gemma, tokenizer, ["a red cat a"], 6, instruction)
    assert max_error(long, cut) <= 1e-5
    tokenizer.pad_token = "red"
    other = text_encoding.encode_captions(gemma, tokenizer, ["a cat"], 6, instruction)
    plain = text_encoding.encode_captions(gemma, tiny_tokenizer(), ["a cat"], 6, instruction)
    assert max_error(other[:, :4], plain[:, :4]) <= 1e-6
    assert max_error(other[:, 4:], plain[:, 4:]) > 1e-3


def test_full_length_encoding_uses_the_whole_instruction():
    encoded = text_encoding.encode_captions(tiny_gemma(), tiny_tokenizer(), ["a red cat"])
    assert encoded.shape == (1, 300, 24)


# ---------------------------------------------------------------------- the pipeline


def make_decoder(scheduler: PiDScheduler | None = None, **parts: Any) -> PiDDecoder:
    parts = {"text_encoder": tiny_gemma(), "tokenizer": tiny_tokenizer(), "instruction": "User Prompt : "} | parts
    decoder = PiDDecoder(recorded_net("qwen_v15"), scheduler or PiDScheduler(), **parts)
    decoder.set_progress_bar_config(disable=True)
    return decoder


LATENTS = torch.randn(2, 16, 1, 2, generator=torch.Generator().manual_seed(0))


def test_the_decoder_repeats_a_recorded_picture(monkeypatch):
    """The recorded noise goes in where the generator's would."""
    data, decoder = sampler_data(), make_decoder()
    noises = iter([data["sde4/noise"], *(data[f"sde4/eps.{i}"] for i in range(3))])
    for module in ("pipeline", "scheduling"):
        monkeypatch.setattr(f"diffusers_continuous.pid.{module}.randn_tensor", lambda *args, **kwargs: next(noises))
    images = decoder(
        data["cond.lq_latent"], prompt_embeds=data["cond.y"], sigma=data["cond.degrade_sigma"], output_type="latent"
    ).images
    assert max_error(images, data["sde4/final"]) <= 2e-3
    assert next(noises, None) is None


def test_a_row_is_the_same_alone_and_in_a_batch():
    decoder, captions = make_decoder(), ["a cat", "a red cat"]
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    both = decoder(LATENTS, captions, [0.0, 0.3], generator=generators, output_type="latent").images
    assert both.shape == (2, 3, 32, 64)
    for row in range(2):
        alone = decoder(
            LATENTS[row : row + 1],
            captions[row],
            [0.0, 0.3][row],
            generator=torch.Generator().manual_seed(5 + row),
            output_type="latent",
        ).images
        assert max_error(alone, both[row : row + 1]) <= 1e-3  # other batch, other kernels, four steps of growth


def test_output_types_and_budget():
    decoder = make_decoder()

    def run(**options: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        return decoder(LATENTS, "a cat", num_inference_steps=2, generator=generator, **options).images

    raw, (picture, _) = run(output_type="latent"), run()
    assert picture.size == (64, 32)
    assert max_error(run(output_type="pt"), raw / 2 + 0.5) <= 1e-6
    assert run(output_type="np").shape == (2, 32, 64, 3)
    budget = decoder.transformer.estimate_decode_bytes(32, 64, 2, chunk=1)
    assert max_error(run(output_type="latent", max_bytes=budget), raw) <= 1e-3


def test_packed_latents_are_unpacked_and_the_rest_refused():
    decoder, latents = make_decoder(), torch.randn(1, 16, 4, 6)
    packed = QwenImagePipeline._pack_latents(latents, 1, 16, 4, 6)
    assert torch.equal(decoder.unpack_latents(packed, 32, 48), latents)
    assert torch.equal(decoder.unpack_latents(latents.flatten(2).transpose(1, 2), 32, 48), latents)
    assert decoder.unpack_latents(latents, 32, 48) is latents
    for wrong, size, message in [
        (packed, (None, None), "need height and width"),
        (packed, (32, 64), "are not 16 x 32 x 64"),
        (latents, (32, 64), "are of 32 x 48 pixels"),
        (latents[:, :, None], (None, None), r"\(batch, 16, h, w\)"),
    ]:
        with pytest.raises(RequestError, match=message):
            decoder(wrong, "a cat", height=size[0], width=size[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latents": torch.zeros(1, 4, 1, 2)}, "16 channels, not 4"),
        ({"sigma": 1.2}, "between 0 and 1"),
        ({"sigma": [0.1]}, "one number or 2"),
        ({"num_inference_steps": 5}, "twice"),
        ({"guidance_scale": 4.0}, "distilled"),
        ({"prompt": ["a", "b", "c"]}, "3 captions do not fit 2"),
        ({"prompt": None}, "pass prompt or prompt_embeds"),
        ({"prompt": None, "prompt_embeds": torch.zeros(3, 20, 24)}, "do not fit 2"),
        ({"generator": [torch.Generator()]}, "1 generators do not fit 2"),
        ({"max_bytes": 1000}, "need at least"),
    ],
)
def test_a_wrong_call_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        make_decoder()(**{"latents": LATENTS, "prompt": "a cat", **options})


def test_a_result_that_is_not_finite_fails_with_its_step():
    decoder = make_decoder()
    hook = decoder.transformer.register_forward_hook(
        lambda _, args, out: (out[0] * (math.nan if args[1][0] < 700 else 1),)
    )
    try:
        with pytest.raises(StepFailedError, match="step 3 of 4"):
            decoder(LATENTS, "a cat")
    finally:
        hook.remove()


def test_an_undistilled_decoder_is_guided_away_from_the_negative_prompt():
    decoder = make_decoder(PiDScheduler("dpmsolver++", None, shift_reference=2048))

    def run(**options: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return decoder(
            LATENTS[:1], "a cat", num_inference_steps=3, generator=generator, output_type="latent", **options
        ).images

    plain, guided = run(guidance_scale=1), run(guidance_scale=3, negative_prompt="red")
    assert max_error(plain, guided) > 1e-2
    assert max_error(run(guidance_scale=3, negative_prompt="a cat"), plain) <= 1e-3


def test_the_decoder_survives_saving_and_lets_go_of_its_text_encoder(tmp_path):
    decoder = make_decoder()
    decoder.save_pretrained(tmp_path)
    again = PiDDecoder.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    images = [
        each(LATENTS, "a cat", generator=torch.Generator().manual_seed(0), output_type="latent").images
        for each in (decoder, again)
    ]
    assert torch.equal(*images)
    embeds = again.encode_prompt("a cat")
    again.free_text_encoder()
    with pytest.raises(RequestError, match="no text encoder"):
        again(LATENTS, "a red cat")
    for caption in ({"prompt_embeds": embeds}, {"prompt": "a cat"}):  # what was encoded stays good
        generator = torch.Generator().manual_seed(0)
        freed = again(LATENTS, **caption, generator=generator, output_type="latent").images
        assert torch.equal(freed, images[0])
    again.save_pretrained(tmp_path / "bare")
    assert PiDDecoder.from_pretrained(tmp_path / "bare").text_encoder is None


class Outer(DiffusionPipeline):
    """A pipeline that has a decoder where others have a VAE."""

    _optional_components: ClassVar = ["decoder"]

    def __init__(self, decoder: Any = None) -> None:
        super().__init__()
        self.register_modules(decoder=decoder)


def test_the_decoder_loads_as_another_pipelines_component(tmp_path):
    Outer(make_decoder()).save_pretrained(tmp_path)
    decoder = Outer.from_pretrained(tmp_path).decoder
    assert type(decoder) is PiDDecoder
    assert type(decoder.transformer) is PiDTransformer2DModel
    assert decoder.config.instruction == "User Prompt : "


def test_an_official_file_becomes_a_decoder(tmp_path, monkeypatch):
    """The table's full-size configuration is swapped for the recorded net's."""
    path = official_file("qwen_v15", tmp_path / "official.pth")
    config = conversion.convert_config(MANIFEST["nets"]["qwen_v15"]["config"])
    monkeypatch.setattr(checkpoints.Checkpoint, "config", property(lambda self: config))
    decoder = PiDDecoder.from_original(
        path, backbone="qwenimage", text_encoder=tiny_gemma(), tokenizer=tiny_tokenizer()
    )
    assert decoder.transformer.dtype == torch.bfloat16
    assert decoder.scheduler.max_steps == 4
    teacher = PiDDecoder.from_original(path, checkpoint_type="undistilled")
    assert not teacher.is_distilled
    with pytest.raises(ConfigError, match="There are"):
        PiDDecoder.from_original(path, sr_scale=8)
    with pytest.raises(ConfigError, match="the text encoder is 48 wide"):
        PiDDecoder(decoder.transformer, PiDScheduler(), tiny_gemma(48))


# ---------------------------------------------------------------------- bad input


GOOD = {
    "hidden_states": torch.zeros(2, 3, 32, 64),
    "timestep": torch.tensor([500.0, 500.0]),
    "encoder_hidden_states": torch.zeros(2, 4, 24),
    "latents": torch.zeros(2, 16, 1, 2),
    "sigma": torch.zeros(2),
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"latents": torch.zeros(2, 4, 1, 2)}, "16 channels, not 4"),
        ({"latents": torch.zeros(2, 2, 64)}, "unpacked"),
        ({"latents": torch.zeros(3, 16, 1, 2)}, "3 latents do not fit 2"),
        ({"sigma": torch.tensor([0.5, 1.5])}, "between 0 and 1"),
        ({"sigma": torch.tensor([0.5, math.nan])}, "between 0 and 1"),
        ({"sigma": -0.1}, "between 0 and 1"),
        ({"sigma": torch.zeros(3)}, "one number or 2"),
        ({"timestep": torch.tensor([1001.0, 0.0])}, "between 0 and 1000"),
        ({"timestep": [1.0]}, "one number or 2"),
        ({"hidden_states": torch.zeros(2, 3, 40, 64)}, "multiple of 16 pixels, not 40 x 64"),
        ({"hidden_states": torch.zeros(2, 3, 0, 64)}, "multiple of 16"),
        ({"hidden_states": torch.zeros(2, 4, 32, 64)}, r"\(batch, 3, height, width\)"),
        ({"encoder_hidden_states": torch.zeros(1, 4, 24)}, "1 captions do not fit 2"),
        ({"encoder_hidden_states": torch.zeros(2, 4, 25)}, r"\(batch, tokens, 24\)"),
        ({"encoder_hidden_states": torch.zeros(2, 0, 24)}, r"\(batch, tokens, 24\)"),
        ({"chunk": 0}, "at least 1 patch"),
    ],
)
@torch.no_grad()
def test_bad_input_is_refused_before_any_work(wrong, message):
    net = recorded_net("qwen_v15")

    def work(*_: Any) -> None:
        raise AssertionError("the network was run")

    hooks = [part.register_forward_pre_hook(work) for part in (net.lq_proj, net.s_embedder, net.t_embedder)]
    try:
        with pytest.raises(RequestError, match=message):
            net(**{**GOOD, **wrong})
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_features_of_another_size_are_refused():
    net = recorded_net("qwen_v15")
    features = net.encode_latents(GOOD["latents"])
    assert features.grid == (2, 4)
    with pytest.raises(RequestError, match="features were encoded for"):
        net(**{**GOOD, "latents": features, "hidden_states": torch.zeros(2, 3, 64, 64)})
    with pytest.raises(RequestError, match="multiple of 16"):
        net.encode_latents(GOOD["latents"], 33, 64)
    with pytest.raises(RequestError, match="unpacked"):
        net.encode_latents(torch.zeros(2, 2, 64))
    other = net.encode_latents(GOOD["latents"], 64, 64)
    with pytest.raises(ValueError, match="one grid"):
        LatentFeatures.stack([features, other])


def test_untrained_sizes_are_warned_about_and_not_refused():
    net = PiDTransformer2DModel(**PEAK_CONFIG, trained_sides=(64, 128))
    with pytest.warns(UserWarning, match="512 x 512 pixels is outside"):
        net.warn_if_untrained_size(512, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.warn_if_untrained_size(64, 256)
        PiDTransformer2DModel(**PEAK_CONFIG).warn_if_untrained_size(16, 16)
    for height, width in ((2048, 2048), (2304, 1728), (1536, 2688)):
        low, high = find_checkpoint("flux", "2k").config["trained_sides"]
        assert low <= math.sqrt(height * width) <= high


def test_the_public_names_are_sorted_and_all_there():
    assert pid.__all__ == sorted(pid.__all__)
    assert all(getattr(pid, name) is not None for name in pid.__all__)


def test_sizes_follow_the_latent():
    assert recorded_net("qwen_v15").output_size(torch.zeros(1, 16, 3, 5)) == (96, 160)
    assert recorded_net("sr8_v1").output_size(torch.zeros(1, 12, 2, 1)) == (128, 64)


logging.getLogger("diffusers").setLevel(logging.ERROR)  # its `to(dtype)` warns about an empty list of modules
