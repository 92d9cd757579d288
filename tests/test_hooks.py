"""What hangs on a pipeline (offloading, casting, LoRA, compilation, hooks) keeps working, and so does our packed path.

Every attachment is tried on the components before our pipeline is built from them and on a pipeline that was used
already. The oracle is a stock pipeline with the same thing attached to components of its own, run alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import accelerate
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, CpuOffload
from diffusers import QwenImagePipeline
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from diffusers.hooks.group_offloading import GroupOffloadingHook
from diffusers.hooks.layerwise_casting import LayerwiseCastingHook
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
)
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import get_peft_model_state_dict

from conftest import MAX_ABS, generator, load_stock
from diffusers_continuous import ContinuousBatchingPipeline, StepFailedError, UnsupportedModelError
from diffusers_continuous.hooks import is_bare
from diffusers_continuous.models import qwen_image_transformer

CALLS: list[dict[str, Any]] = [
    {"prompt": "a red star", "negative_prompt": " ", "height": 64, "width": 96, "num_inference_steps": 3},
    {"prompt": "a big blue ring on white", "true_cfg_scale": 1.0, "height": 96, "width": 80, "num_inference_steps": 2},
]
WARM_UP = {"prompt": "a cross", "height": 64, "width": 64, "num_inference_steps": 2, "true_cfg_scale": 1.0}
NUM_STEPS = max(call["num_inference_steps"] for call in CALLS)
# Of pictures in 0..1: their latents differ by at most MAX_ABS, and the one-frame decoder by 5e-6 of its own.
MAX_PIXEL = 1e-3


@dataclass
class Result:
    """One call's latents and its picture in 0..1."""

    latents: torch.Tensor
    image: torch.Tensor


def run_alone(pipe: QwenImagePipeline, calls: list[dict[str, Any]] = CALLS) -> list[Result]:
    """Each call by itself through a stock pipeline."""
    results = []
    for number, call in enumerate(calls):
        seen: dict[str, Any] = {}

        def keep(_pipe: Any, _step: int, _time: Any, values: dict[str, Any], seen: dict[str, Any] = seen) -> Any:
            seen.update(values)
            return values

        noise = {} if "latents" in call else {"generator": generator(number)}
        image = pipe(**call, **noise, output_type="pt", callback_on_step_end=keep).images
        results.append(Result(seen["latents"], image))
    return results


def run_together(pipe: ContinuousBatchingPipeline, calls: list[dict[str, Any]] = CALLS) -> list[Result]:
    """All calls in one batch from the first step on."""
    engine = pipe._running_engine()
    with engine.pause():
        names = []
        for number, call in enumerate(calls):
            noise = {} if "latents" in call else {"generator": generator(number)}
            names.append(engine.add_request(**call, **noise, output_type="pt"))
    outputs = [engine.get_result(name, timeout=120) for name in names]
    for output in outputs:
        assert output is not None
        if output.error is not None:
            raise output.error
    return [Result(output.latents, output.images) for output in outputs]


def assert_equal(ours: list[Result], theirs: list[Result]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.latents.shape == other.latents.shape
        assert mine.latents.dtype == other.latents.dtype
        assert (mine.latents - other.latents).abs().max() <= MAX_ABS
        assert (mine.image.float() - other.image.float()).abs().max() <= MAX_PIXEL


def stock_over(pipe: ContinuousBatchingPipeline) -> QwenImagePipeline:
    """The stock pipeline over the very same components."""
    stock = QwenImagePipeline(**pipe.components)
    stock.set_progress_bar_config(disable=True)
    return stock


def module_names(pipe: Any, modules: list[Any]) -> set[str]:
    names = {
        id(module): f"{component}.{name}"
        for component in ("text_encoder", "transformer", "vae")
        for name, module in getattr(pipe, component).named_modules()
    }
    return {names[id(module)] for module in modules}


@pytest.fixture(scope="module")
def plain(stock: QwenImagePipeline) -> list[Result]:
    """The calls' results with nothing attached."""
    return run_alone(stock)


@pytest.fixture
def packed_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a block is entered on our path."""
    entered: list[int] = []
    original = qwen_image_transformer._packed_block

    def spy(*args: Any, **kwargs: Any) -> Any:
        entered.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(qwen_image_transformer, "_packed_block", spy)
    return entered


# ---------------------------------------------------------------------- what can be attached


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA over every kind of linear layer, as a trainer would save it."""
    transformer = load_stock().transformer
    targets = ["to_q", "to_v", "add_k_proj", "to_out.0", "img_mlp.net.2", "img_mod.1", "norm_out.linear", "proj_out"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    folder = str(tmp_path_factory.mktemp("lora"))
    QwenImagePipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(transformer))
    return folder


class Fired(list[Any]):
    """The modules whose hook fired, whatever kind it is, and where LoRA weights lie."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lora_folder: str) -> None:
        super().__init__()
        self.lora_folder = lora_folder
        for cls in (CpuOffload, AlignDevicesHook, GroupOffloadingHook, LayerwiseCastingHook):
            monkeypatch.setattr(cls, "pre_forward", self._recording(cls.pre_forward, position=1))
        monkeypatch.setattr(LoraLinear, "forward", self._recording(LoraLinear.forward, position=0))
        # Accelerate cannot offload sequentially to "cpu:0", the device that diffusers makes of "cpu".
        monkeypatch.setattr(
            accelerate,
            "cpu_offload",
            lambda model, device, **options: cpu_offload(model, torch.device(device.type), **options),
        )

    def _recording(self, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def spy(*args: Any, **kwargs: Any) -> Any:
            self.append(args[position])
            return original(*args, **kwargs)

        return spy


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch, lora_folder: str) -> Fired:
    return Fired(monkeypatch, lora_folder)


def offload_model(pipe: Any, fired: Fired) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def offload_sequentially(pipe: Any, fired: Fired) -> None:
    pipe.enable_sequential_cpu_offload(device="cpu")


def offload_blocks(pipe: Any, fired: Fired) -> None:
    cpu = torch.device("cpu")
    pipe.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)


def offload_leaves(pipe: Any, fired: Fired) -> None:
    cpu = torch.device("cpu")
    pipe.enable_group_offload(cpu, cpu, offload_type="leaf_level")


def cast_layers(pipe: Any, fired: Fired) -> None:
    for component in (pipe.transformer, pipe.vae):
        component.enable_layerwise_casting(torch.float8_e4m3fn, pipe.transformer.dtype)


def load_lora(pipe: Any, fired: Fired) -> None:
    pipe.load_lora_weights(fired.lora_folder)


def hook_every_module(pipe: Any, fired: Fired) -> None:
    pipe.handles = [
        module.register_forward_pre_hook(lambda module, _: fired.append(module))
        for component in (pipe.text_encoder, pipe.transformer, pipe.vae)
        for module in component.modules()
    ]
    # And some that change what the module returns.
    for module in (pipe.transformer.norm_out, pipe.transformer.transformer_blocks[1].attn.norm_k, pipe.vae.decoder):
        pipe.handles.append(module.register_forward_hook(lambda _module, _args, output: output * 1.1))


def remove_hooks(pipe: Any) -> None:
    pipe.remove_all_hooks()


def remove_group_hooks(pipe: Any) -> None:
    for component in (pipe.text_encoder, pipe.transformer, pipe.vae):
        HookRegistry.check_if_exists_or_initialize(component).remove_hook("group_offloading", recurse=True)


def unload_lora(pipe: Any) -> None:
    pipe.unload_lora_weights()


def remove_handles(pipe: Any) -> None:
    for handle in pipe.handles:
        handle.remove()


ATTACH: dict[str, Callable[[Any, Fired], None]] = {
    "model offload": offload_model,
    "sequential offload": offload_sequentially,
    "group offload of blocks": offload_blocks,
    "group offload of leaves": offload_leaves,
    "layerwise casting": cast_layers,
    "LoRA": load_lora,
    "module hooks": hook_every_module,
}
DETACH: dict[str, Callable[[Any], None]] = {
    "model offload": remove_hooks,
    "sequential offload": remove_hooks,
    "group offload of blocks": remove_group_hooks,
    "group offload of leaves": remove_group_hooks,
    "LoRA": unload_lora,
    "module hooks": remove_handles,
}


@pytest.fixture(scope="module")
def oracles() -> dict[str, tuple[list[Result], set[str]]]:
    """By attachment: what the stock pipeline makes with it, and the modules whose hook fired on the way."""
    return {}


@pytest.fixture
def expect(oracles: dict[str, Any], fired: Fired) -> Callable[[str], tuple[list[Result], set[str]]]:
    def expect(name: str) -> tuple[list[Result], set[str]]:
        if name not in oracles:
            pipe = load_stock()
            ATTACH[name](pipe, fired)
            fired.clear()
            results = run_alone(pipe)
            oracles[name] = results, module_names(pipe, fired)
            fired.clear()
        return oracles[name]

    return expect


@pytest.fixture
def attach(
    make_pipe: Callable[..., ContinuousBatchingPipeline], fired: Fired
) -> Callable[[str, str], ContinuousBatchingPipeline]:
    """Builds a pipeline of ours with something attached "before" it is built, or "after" it was used."""

    def attach(name: str, when: str) -> ContinuousBatchingPipeline:
        if when == "before":
            stock = load_stock()
            ATTACH[name](stock, fired)
            pipe = ContinuousBatchingPipeline(**stock.components)
            pipe.set_progress_bar_config(disable=True)
            pipe.handles = getattr(stock, "handles", None)
        else:
            pipe = make_pipe(fresh=True)
            pipe(**WARM_UP)
            ATTACH[name](pipe, fired)
        fired.clear()
        return pipe

    return attach


# ---------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ATTACH)
def test_our_path_runs_the_hook_fires_and_the_picture_is_the_stock_one(
    name, when, attach, expect, fired, packed_blocks
):
    expected, names = expect(name)
    assert names
    pipe = attach(name, when)
    packed_blocks.clear()
    assert_equal(run_together(pipe), expected)
    assert module_names(pipe, fired) == names
    assert len(packed_blocks) == NUM_STEPS * len(pipe.transformer.transformer_blocks)

    # The stock pipeline over the same components: beside our engine, and when that has stopped.
    packed_blocks.clear()
    assert_equal(run_alone(stock_over(pipe), CALLS[:1]), expected[:1])
    pipe._engine.stop()
    assert_equal(run_alone(stock_over(pipe), CALLS[:1]), expected[:1])
    assert not packed_blocks


def test_a_hook_on_any_single_module_is_enough_to_be_called(make_pipe, expect):
    """Short cuts past a module are taken only where nothing hangs on it, be it on that one alone."""
    pipe, fired = make_pipe(fresh=True), []
    pipe(**WARM_UP)
    modules = pipe.transformer.named_modules(prefix="transformer")
    chosen = {name: module for name, module in modules if "_blocks." not in name or "_blocks.1." in name}
    fires_in_stock = expect("module hooks")[1] - {"transformer.pos_embed"}  # whose tables are kept from the warm-up
    names = [name for name in chosen if name in fires_in_stock]
    assert len(names) > 40
    for name in names:
        handle = chosen[name].register_forward_pre_hook(lambda module, _: fired.append(module))
        pipe(**WARM_UP, output_type="latent")
        handle.remove()
        assert fired, name
        fired.clear()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", DETACH)
def test_once_it_is_removed_everything_is_as_before(name, when, attach, plain, packed_blocks, monkeypatch):
    pipe = attach(name, when)
    run_together(pipe, [WARM_UP])
    DETACH[name](pipe)
    monkeypatch.setattr(pipe.vae, "decode", None)  # the fast decoder and the merged weights are back, too
    assert_equal(run_together(pipe), plain)
    monkeypatch.undo()
    transformer = pipe.transformer
    assert all(qwen_image_transformer._is_plain(block.attn) for block in transformer.transformer_blocks)
    assert qwen_image_transformer.can_merge(transformer)
    pipe._engine.stop()
    assert all(is_bare(module) for module in transformer.modules())
    assert_equal(run_alone(stock_over(pipe), CALLS[:1]), plain[:1])


@pytest.mark.parametrize("name", [name for name in DETACH if name != "LoRA"])
def test_hooks_may_outlive_the_engine(name, attach, expect, plain, packed_blocks):
    """Stopped with hooks installed, then the hooks go: nothing of ours is left under them."""
    pipe = attach(name, "after")
    run_together(pipe, [WARM_UP])
    pipe._engine.stop()
    packed_blocks.clear()
    DETACH[name](pipe)
    assert_equal(run_alone(stock_over(pipe), CALLS[:1]), plain[:1])
    assert not packed_blocks
    assert all(is_bare(module) for module in pipe.transformer.modules())


def test_a_stopped_engine_leaves_no_forward_behind(make_pipe):
    pipe = make_pipe(fresh=True)
    assert not any("forward" in module.__dict__ for module in pipe.transformer.modules())
    pipe(**WARM_UP)
    assert "forward" in pipe.transformer.__dict__
    pipe._engine.stop()
    assert not any("forward" in module.__dict__ for module in pipe.transformer.modules())
    pipe(**WARM_UP)  # a new engine
    assert "forward" in pipe.transformer.__dict__


def test_two_pipelines_over_the_same_components_do_not_undo_each_other(make_pipe, plain):
    first = make_pipe(fresh=True)
    second = ContinuousBatchingPipeline(**first.components)
    second.set_progress_bar_config(disable=True)
    first(**WARM_UP)
    second(**WARM_UP)
    first._engine.stop()
    assert_equal(run_together(second), plain)
    second._engine.stop()
    assert not any("forward" in module.__dict__ for module in first.transformer.modules())


def test_an_engine_that_is_still_stopping_does_not_undo_its_successor(make_pipe, plain, monkeypatch):
    """`stop(block=False)`, a new call at once: the old loop leaves after the new engine was made."""
    pipe = make_pipe(fresh=True)
    pipe(**WARM_UP)
    old, may_close, close = pipe._engine, threading.Event(), pipe._engine.runner.close
    monkeypatch.setattr(old.runner, "close", lambda: may_close.wait(60) and close())
    old.stop(block=False)
    pipe(**WARM_UP)
    assert pipe._engine is not old
    may_close.set()
    old._thread.join(60)
    assert_equal(run_together(pipe), plain)


# ---------------------------------------------------------------------- casting, dtypes, weights


@pytest.mark.parametrize("when", ["before", "after"])
def test_layerwise_casting_to_bf16_is_as_exact_as_the_stock_pipelines(when, make_pipe, packed_blocks):
    def cast(pipe: Any) -> Any:
        pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, pipe.transformer.dtype)
        return pipe

    noise = [torch.randn(1, c["height"] * c["width"] // 256, 64, generator=generator(i)) for i, c in enumerate(CALLS)]
    calls = [{**c, "latents": n.bfloat16(), "num_inference_steps": 4} for c, n in zip(CALLS, noise, strict=True)]
    exact_pipe = load_stock()
    for component in (exact_pipe.text_encoder, exact_pipe.transformer):
        for parameter in component.parameters():  # the same rounded weights
            parameter.data = parameter.data.bfloat16().float()
    exact = run_alone(cast(exact_pipe), [{**c, "latents": c["latents"].float()} for c in calls])
    theirs = run_alone(cast(load_stock(torch.bfloat16)), calls)
    if when == "before":
        pipe = ContinuousBatchingPipeline(**cast(load_stock(torch.bfloat16)).components)
        pipe.set_progress_bar_config(disable=True)
    else:
        pipe = make_pipe(dtype=torch.bfloat16)
        pipe(**WARM_UP)
        cast(pipe)
    ours = run_together(pipe, calls)
    assert packed_blocks
    assert pipe.transformer.img_in.weight.dtype == torch.float8_e4m3fn

    def rms(results: list[Result]) -> float:
        pairs = zip(results, exact, strict=True)
        return float(torch.stack([(a.latents.float() - b.latents).square().mean() for a, b in pairs]).mean().sqrt())

    assert 0 < rms(ours) <= 1.5 * rms(theirs)


def test_float16_is_refused_with_advice(make_pipe):
    with pytest.raises(UnsupportedModelError, match=r"float16 .* dtype=torch\.bfloat16"):
        make_pipe(dtype=torch.float16)(**WARM_UP)


def test_a_request_that_waited_while_the_pipeline_was_cast_follows_it(make_pipe):
    pipe = make_pipe(fresh=True)
    embeds, mask = pipe.encode_prompt("a star")
    engine = pipe._running_engine()
    with engine.pause():
        names = [
            engine.add_request(**WARM_UP, output_type="latent"),
            engine.add_request(
                **{**WARM_UP, "prompt": None},
                prompt_embeds=embeds.detach(),
                prompt_embeds_mask=torch.ones_like(embeds[..., 0]) if mask is None else mask,
                output_type="latent",
            ),
        ]
        pipe.to(torch.bfloat16)
    for name in names:
        output = engine.get_result(name, timeout=60)
        assert output.error is None
        assert output.latents.dtype == torch.bfloat16


@pytest.mark.parametrize("edit", ["in place", "behind the version counter", "moved there and back"])
def test_weights_edited_between_two_requests_are_noticed(edit, make_pipe, plain):
    pipe = make_pipe(fresh=True)
    run_together(pipe)
    attention = pipe.transformer.transformer_blocks[0].attn
    for weight in (attention.to_k.weight, attention.add_q_proj.weight, pipe.vae.decoder.conv_in.weight):
        if edit == "in place":
            with torch.no_grad():
                weight.mul_(1.5)
        elif edit == "behind the version counter":
            weight.data *= 1.5
        else:
            for _ in range(3):  # the allocator likes to hand out the first address again
                weight.data = (weight.data * 1.1).double()
                weight.data = weight.data.float()
    ours = run_together(pipe)
    assert (ours[0].latents - plain[0].latents).abs().max() > 1e-3
    assert_equal(ours, run_alone(stock_over(pipe)))


def test_a_lora_fused_into_the_weights_stays_when_its_layers_are_unloaded(make_pipe, lora_folder, plain):
    pipe = make_pipe(fresh=True)
    run_together(pipe)
    pipe.load_lora_weights(lora_folder)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    ours = run_together(pipe)
    assert (ours[0].latents - plain[0].latents).abs().max() > 1e-3
    assert_equal(ours, run_alone(stock_over(pipe)))


def test_a_copied_transformer_is_independent(make_pipe, plain):
    pipe = make_pipe(fresh=True)
    pipe(**WARM_UP)
    twin = copy.deepcopy(pipe.transformer)
    other = QwenImagePipeline(**{**pipe.components, "transformer": twin})
    other.set_progress_bar_config(disable=True)
    assert_equal(run_alone(other), plain)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    changed = run_alone(other)[0].latents  # its forward reads its own weights
    assert (changed - plain[0].latents).abs().max() > 1e-2
    assert_equal(run_together(pipe), plain)


def test_a_pipeline_with_hooks_saves_the_stock_folder(attach, fired, plain, tmp_path):
    pipe = attach("model offload", "after")
    run_together(pipe, [WARM_UP])
    pipe.save_pretrained(tmp_path)
    loaded = QwenImagePipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is QwenImagePipeline
    assert_equal(run_alone(loaded), plain)


# ---------------------------------------------------------------------- what is refused


class ForeignProcessor(QwenDoubleStreamAttnProcessor2_0):
    """One that changes what comes out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        image, text = super().__call__(*args, **kwargs)
        return 2 * image, text


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_foreign_attention_processor_is_refused_and_its_removal_heals(when, make_pipe, plain):
    pipe = make_pipe(fresh=True)
    if when == "after":
        pipe(**WARM_UP)
    pipe.transformer.set_attn_processor(ForeignProcessor())
    with pytest.raises((UnsupportedModelError, StepFailedError), match="ForeignProcessor does not know packed rows"):
        pipe(**WARM_UP)
    pipe.transformer.set_attn_processor(QwenDoubleStreamAttnProcessor2_0())
    assert_equal(run_together(pipe), plain)


@pytest.mark.parametrize("how", ["enable_cache", "apply_first_block_cache"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_is_refused_and_its_removal_heals(when, how, make_pipe, plain):
    pipe = make_pipe(fresh=True)
    if when == "after":
        pipe(**WARM_UP)
    if how == "enable_cache":
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    else:
        apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises((UnsupportedModelError, StepFailedError), match=r"cache hooks .* would mix them up"):
        pipe(**WARM_UP)
    if how == "enable_cache":
        pipe.transformer.disable_cache()
    else:
        registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
        registry.remove_hook("fbc_leader_block_hook", recurse=True)
        registry.remove_hook("fbc_block_hook", recurse=True)
    assert_equal(run_together(pipe), plain)


class OtherBlock(QwenImageTransformerBlock):
    """A block with a mind of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[::-1]


@pytest.mark.parametrize("how", ["on the instance", "by a subclass"])
def test_a_replaced_forward_is_refused(how, make_pipe):
    pipe = make_pipe(fresh=True)
    block = pipe.transformer.transformer_blocks[0]
    if how == "on the instance":
        block.forward = functools.partial(block.forward)
    else:
        block.__class__ = OtherBlock
    with pytest.raises(UnsupportedModelError, match=rf"{type(block).__name__}\.forward was replaced"):
        pipe(**WARM_UP)


def test_a_transformer_wrapped_by_the_compiler_is_refused_with_advice(make_pipe, plain):
    pipe = make_pipe(fresh=True)
    pipe(**WARM_UP)
    transformer = pipe.transformer
    with pytest.raises(UnsupportedModelError, match=r"OptimizedModule is not .*compile_repeated_blocks"):
        pipe.transformer = torch.compile(transformer, backend="eager")
    pipe.transformer = transformer
    assert_equal(run_together(pipe), plain)


# ---------------------------------------------------------------------- LoRA scales


def test_rows_of_different_lora_scale_run_in_separate_forwards(make_pipe, lora_folder, monkeypatch):
    stock, pipe = load_stock(), make_pipe(fresh=True)
    for either in (stock, pipe):
        either.load_lora_weights(lora_folder, adapter_name="style")
        either.set_adapters(["style"], [0.5])
    scales = (None, 0.3, 0.0, 0.3, None)
    calls = [
        {**CALLS[i % 2], "num_inference_steps": 3, "attention_kwargs": None if scale is None else {"scale": scale}}
        for i, scale in enumerate(scales)
    ]
    expected = []
    for call in calls:
        expected += run_alone(stock, [call])
        stock.set_adapters(["style"], [0.5])  # the stock pipeline forgets it after a scale of 0
    forwards: list[Any] = []
    original = qwen_image_transformer._packed_transformer

    def spy(*args: Any, **kwargs: Any) -> Any:
        forwards.append((str(kwargs["attention_kwargs"]), id(kwargs["packed"].layout)))
        return original(*args, **kwargs)

    monkeypatch.setattr(qwen_image_transformer, "_packed_transformer", spy)
    engine = pipe.init_continuous_batching(scheduler_type="fcfs")  # all rows are in every step
    engine.start()
    with engine.pause():
        names = [engine.add_request(**call, generator=generator(0), output_type="latent") for call in calls]
    for name, want in zip(names, expected, strict=True):
        assert (engine.get_result(name, timeout=60).latents - want.latents).abs().max() <= MAX_ABS
    assert len(forwards) == 3 * len(set(scales))
    assert len(set(forwards)) == len(set(scales))  # and what is kept from step to step is kept for each of them
    scaling = pipe.transformer.transformer_blocks[0].attn.to_q.scaling
    assert scaling == stock.transformer.transformer_blocks[0].attn.to_q.scaling


def test_a_step_that_fails_leaves_the_lora_scale_as_it_was(make_pipe, lora_folder):
    pipe = make_pipe(fresh=True)
    pipe.load_lora_weights(lora_folder)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    before = dict(layer.scaling)

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    with contextlib.closing(pipe.stream(**WARM_UP)):
        pass
    handle = pipe.transformer.proj_out.register_forward_hook(fail)
    with pytest.raises(StepFailedError, match="broken"):
        pipe(**WARM_UP, attention_kwargs={"scale": 0.3})
    handle.remove()
    assert layer.scaling == before


# ---------------------------------------------------------------------- the VAE


def test_group_offload_of_the_vae_alone_decodes_the_stock_way(make_pipe, plain, fired, monkeypatch):
    pipe, cpu, decoded = make_pipe(fresh=True), torch.device("cpu"), []
    decode = pipe.vae.decode
    monkeypatch.setattr(pipe.vae, "decode", lambda *args, **kwargs: decoded.append(1) or decode(*args, **kwargs))
    assert_equal(run_together(pipe), plain)
    assert not decoded
    pipe.vae.enable_group_offload(cpu, cpu, offload_type="leaf_level")
    fired.clear()
    assert_equal(run_together(pipe), plain)
    assert decoded
    assert "vae.decoder.conv_in" in module_names(pipe, fired)


# ---------------------------------------------------------------------- model offload in phases


class Residency:
    """Follows which components are on the device, from the hooks that move them. On a CPU nothing really moves."""

    def __init__(self, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = {id(getattr(pipe, name)): name for name in ("text_encoder", "transformer", "vae")}
        self.resident: set[str] = set()
        self.most = 0
        self.arrivals: list[str] = []
        bring, send_off = CpuOffload.pre_forward, CpuOffload.init_hook

        def pre_forward(hook: CpuOffload, module: Any, *args: Any, **kwargs: Any) -> Any:
            name = self.names[id(module)]
            if name not in self.resident:
                self.arrivals.append(name)
            self.resident.add(name)
            self.most = max(self.most, len(self.resident))
            return bring(hook, module, *args, **kwargs)

        def init_hook(hook: CpuOffload, module: Any) -> Any:
            self.resident.discard(self.names[id(module)])
            return send_off(hook, module)

        monkeypatch.setattr(CpuOffload, "pre_forward", pre_forward)
        monkeypatch.setattr(CpuOffload, "init_hook", init_hook)


@pytest.fixture(params=["before", "after"])
def offloaded(
    request: Any, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[ContinuousBatchingPipeline, Residency]:
    pipe = attach("model offload", request.param)
    return pipe, Residency(pipe, monkeypatch)


def wait_until_idle(pipe: ContinuousBatchingPipeline) -> None:
    with pipe._engine.exclusive():
        pass


def test_one_component_at_a_time_few_switches_and_none_left_when_idle(offloaded):
    pipe, residency = offloaded
    calls = [{**CALLS[i % 2], "prompt": f"star {i}", "num_inference_steps": 4 + i} for i in range(6)]
    run_together(pipe, calls)
    wait_until_idle(pipe)
    assert residency.most == 1
    assert residency.arrivals == ["text_encoder", "transformer", "vae"]  # though they finished in six different steps
    assert residency.resident == set()


@pytest.mark.parametrize(
    ("max_phase_s", "prompt", "arrivals"),
    [
        (60.0, "another", "text_encoder transformer text_encoder transformer vae"),
        (1e-9, "another", "text_encoder transformer text_encoder transformer vae transformer"),
        (1e-9, WARM_UP["prompt"], "text_encoder transformer vae transformer"),  # a known prompt needs no encoder
    ],
)
def test_a_newcomer_waits_for_the_batch_but_not_for_ever(max_phase_s, prompt, arrivals, offloaded):
    """Encoded when the batch has drained, or when `max_phase_s` has passed; the same for decoding."""
    pipe, residency = offloaded
    if pipe._engine is not None:
        pipe._engine.stop()
    engine = pipe.init_continuous_batching(max_phase_s=max_phase_s)
    engine.start()
    name = None
    for _output in pipe.stream(**{**WARM_UP, "num_inference_steps": 60}, output_type="latent"):
        if name is None:
            name = engine.add_request(**{**WARM_UP, "prompt": prompt}, output_type="pt")
    assert engine.get_result(name, timeout=60).error is None
    engine.stop()
    assert residency.most == 1
    assert residency.arrivals == arrivals.split()


def test_a_preview_sends_the_transformer_away_while_it_needs_the_vae(offloaded):
    pipe, residency = offloaded
    previews = []
    for output in pipe.stream(**{**CALLS[0], "num_inference_steps": 8}, output_type="latent"):
        if not output.finished:
            previews.append(output.preview)
    assert output.error is None
    assert previews
    pipe._engine.stop()
    assert residency.most == 1
    assert residency.arrivals.count("vae") == 1  # to fit the preview, which needs no VAE from then on


# ---------------------------------------------------------------------- compilation (last: it leaves much in memory)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks_run_our_path_without_a_graph_break(when, make_pipe, plain):
    graphs: list[Any] = []
    calls: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)

        def run(*args: Any) -> Any:
            calls.append(graph)
            return graph(*args)

        return run

    def num_image_dimensions(graph: Any) -> list[int]:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder" and "hidden_states" in node.name]
        return [node.meta["example_value"].ndim for node in inputs]

    torch._dynamo.reset()
    pipe = make_pipe(fresh=True)
    if when == "after":
        pipe(**WARM_UP)
    pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)
    assert_equal(run_together(pipe), plain)
    assert len(calls) == NUM_STEPS * len(pipe.transformer.transformer_blocks)
    assert len(graphs) == 2  # both rows, then the one that takes a step more
    assert [num_image_dimensions(graph) for graph in graphs] == 2 * [[2, 2]]  # (tokens, dim): packed
    assert_equal(run_together(pipe), plain)
    assert len(graphs) == 2
    assert_equal(run_alone(stock_over(pipe), CALLS[:1]), plain[:1])
    assert num_image_dimensions(graphs[-1]) == [3, 3]
    torch._dynamo.reset()
