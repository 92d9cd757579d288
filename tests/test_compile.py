"""`compile=True`: the same pictures, compiled once for every batch; and never in the way of what hangs on the model."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from conftest import assert_latents_equal, assert_pictures_equal, generator, load_stock
from diffusers_continuous import ConfigError
from diffusers_continuous.models import compiled_blocks

CALLS: list[dict[str, Any]] = [
    {"prompt": "a red star on a blue background", "height": 128, "width": 128, "num_inference_steps": 6},
    {"prompt": "a ring", "height": 64, "width": 96, "num_inference_steps": 4, "true_cfg_scale": 1.0},
    {"prompt": "a black cross above a yellow heart", "height": 96, "width": 64, "num_inference_steps": 5},
]
SIZES = (16, 32, 48, 64, 96)
PROMPTS = ("x", "a ring", "a red star on a blue background", "a black cross above a yellow heart on a red background")


def arguments(call: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    negative = {} if call.get("true_cfg_scale") == 1.0 else {"negative_prompt": " "}
    return {**negative, **call, **more, "generator": generator(seed)}


class Compiler:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*inputs: Any) -> Any:
            self.num_calls += 1
            return graph(*inputs)

        return run


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Stands in for the real compiler."""
    torch._dynamo.reset()
    compiler = Compiler()
    monkeypatch.setattr(compiled_blocks, "BACKEND", compiler)
    yield compiler
    torch._dynamo.reset()


def run_in_turn(pipe: Any, states: list[Any]) -> None:
    """One more request joins at every step, until all have ended."""
    engine, waiting = pipe._engine, list(states)
    while waiting or engine.scheduler.has_requests():
        if waiting:
            engine.submit(waiting.pop(0))
        engine._step()
    assert [state.error for state in states] == [None] * len(states)


def test_every_row_of_a_crowd_equals_the_stock_pipeline(make_pipe, stock, compiler):
    pipe = make_pipe(compile=True)
    assert compiler.num_graphs == 2  # before anybody came
    compiler.num_calls = 0
    outputs = pipe.generate_batch([arguments(call, seed) for seed, call in enumerate(CALLS)])
    num_blocks = len(pipe.transformer.transformer_blocks)
    assert compiler.num_calls == 2 * num_blocks * max(call["num_inference_steps"] for call in CALLS)
    for seed, (call, output) in enumerate(zip(CALLS, outputs.values(), strict=True)):
        seen: dict[str, Any] = {}

        def keep(_pipe: Any, _step: int, _time: Any, values: dict[str, Any], seen: dict[str, Any] = seen) -> Any:
            seen.update(values)
            return values

        picture = stock(**arguments(call, seed), callback_on_step_end=keep).images[0]
        assert_latents_equal(output.latents, seen["latents"])
        assert_pictures_equal(output.images[0], picture)
    assert compiler.num_graphs == 2


def test_nothing_is_compiled_again_while_requests_join_and_leave(make_pipe, compiler):
    pipe = make_pipe(compile=True, max_requests_per_batch=6)
    draw, num_states = random.Random(7), 50
    calls = [
        {
            "prompt": draw.choice(PROMPTS),
            "true_cfg_scale": draw.choice((1.0, 4.0)),
            "height": draw.choice(SIZES),
            "width": draw.choice(SIZES),
            "num_inference_steps": draw.randint(2, 7),
            "output_type": "latent",
        }
        for _ in range(num_states)
    ]
    run_in_turn(pipe, [pipe._make_request(**arguments(call, seed)) for seed, call in enumerate(calls)])
    sizes = {len(step.request_ids) for step in pipe._engine.stats().recent_steps if step.kind == "denoise"}
    assert sizes == set(range(1, 7))
    for call in (CALLS[0], {**CALLS[1], "height": 16, "width": 16}, {**CALLS[1], "prompt": ""}):  # each of them alone
        run_in_turn(pipe, [pipe._make_request(**arguments(call, 0))])
    assert compiler.num_graphs == 2
    assert compiler.num_calls > 4 * num_states


def test_without_the_option_nothing_is_compiled(pipe, compiler):
    pipe(**arguments(CALLS[1], 1))
    assert compiler.num_graphs == 0


def test_a_weight_that_was_edited_between_two_requests_is_seen(make_pipe, compiler):
    pipe, other = make_pipe(fresh=True, compile=True), make_pipe(fresh=True)
    call = {**CALLS[1], "output_type": "latent"}
    before = pipe(**arguments(call, 1)).images
    for each in (pipe, other):
        attn = each.transformer.transformer_blocks[2].attn
        attn.to_q.weight.data += 0.1
        attn.to_add_out.bias.data += 0.1
    after = pipe(**arguments(call, 1)).images
    assert (after - before).abs().max() > 1e-2
    assert_latents_equal(after, other(**arguments(call, 1)).images)
    assert compiler.num_graphs == 2


def test_weights_that_are_not_merged_are_used_as_they_are(make_pipe, stock, compiler, monkeypatch):
    monkeypatch.setattr("diffusers_continuous.models.qwen_image_transformer.MAX_MERGED_BYTES", 0)
    pipe = make_pipe(compile=True)
    call = {**CALLS[0], "output_type": "latent"}
    assert_latents_equal(pipe(**arguments(call, 0)).images, stock(**arguments(call, 0)).images)
    assert compiler.num_graphs == 2


def test_the_step_cache_decides_as_without(make_pipe, compiler):
    threshold, calls = 0.12, [{**call, "num_inference_steps": 12, "output_type": "latent"} for call in CALLS]
    found, skipped = [], []
    for options in ({"compile": True}, {}):
        pipe = make_pipe(step_cache_threshold=threshold, scheduler_type="fcfs", **options)
        found.append(pipe.generate_batch([arguments(call, seed) for seed, call in enumerate(calls)]))
        skipped.append(pipe._engine.stats().num_skipped_branch_steps)
    assert skipped[0] == skipped[1] > 0
    for ours, plain in zip(found[0].values(), found[1].values(), strict=True):
        assert_latents_equal(ours.latents, plain.latents)
    assert compiler.num_graphs == 2


# ---------------------------------------------------------------------- where compiled blocks would pass something over


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "compile=True" in record.message]


@pytest.mark.parametrize("name", ["img_mod.0", "attn", "txt_mlp.net.2", ""])
def test_a_hook_fires_and_the_reason_is_told_once(make_pipe, compiler, caplog, name):
    pipe = make_pipe(fresh=True, compile=True)
    compiler.num_calls, fired = 0, []
    hooked = pipe.transformer.transformer_blocks[1].get_submodule(name)
    handle = hooked.register_forward_hook(lambda *_: fired.append(1))
    call = {**CALLS[1], "num_inference_steps": 2, "output_type": "latent"}
    for seed in range(2):
        pipe(**arguments(call, seed))
    assert len(fired) == 2 * call["num_inference_steps"]
    assert compiler.num_calls == 0
    (warning,) = warnings_of(caplog)
    assert f"transformer_blocks.1{name and '.' + name} has hooks" in warning
    handle.remove()
    pipe(**arguments(call, 0))
    assert compiler.num_calls > 0
    assert compiler.num_graphs == 2


def add_lora(pipe: Any) -> None:
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "img_mlp.net.2"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe.transformer.add_adapter(config)


def offload_leaves(pipe: Any) -> None:
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="leaf_level")


ATTACH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LoRA": (add_lora, r"transformer_blocks\.0\.attn\.to_k is a peft\..*Linear"),
    "own compilation": (lambda pipe: pipe.transformer.compile_repeated_blocks(backend="eager"), "is compiled already"),
    "model offload": (lambda pipe: pipe.enable_model_cpu_offload(device="cpu"), "the transformer has hooks"),
    "leaf offload": (offload_leaves, "has hooks"),
}


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("LoRA", "before"),
        ("LoRA", "after"),
        ("own compilation", "after"),
        *((f"{n} offload", "after") for n in ("model", "leaf")),
    ],
)
def test_what_hangs_on_the_model_is_not_passed_over(make_pipe, compiler, caplog, name, when):
    attach, reason = ATTACH[name]
    pipe, oracle = make_pipe(fresh=True), load_stock()
    if when == "before":
        attach(pipe)
    pipe.init_continuous_batching(compile=True)
    if when == "after":
        attach(pipe)
    if name == "LoRA":
        attach(oracle)
    compiler.num_calls, call = 0, {**CALLS[1], "num_inference_steps": 2, "output_type": "latent"}
    assert_latents_equal(pipe(**arguments(call, 0)).images, oracle(**arguments(call, 0)).images)
    assert compiler.num_calls == 0
    (warning,) = warnings_of(caplog)
    assert re.search(reason, warning)


def test_blocks_are_compiled_once_a_lora_that_was_there_at_first_is_unloaded(make_pipe, compiler):
    pipe = make_pipe(fresh=True)
    add_lora(pipe)
    pipe.init_continuous_batching(compile=True)
    assert compiler.num_graphs == 0
    pipe.unload_lora_weights()
    assert compiler.num_graphs == 2
    compiler.num_calls = 0
    pipe(**arguments({**CALLS[1], "num_inference_steps": 2, "output_type": "latent"}, 0))
    assert compiler.num_calls > 0


def test_a_compiler_that_fails_costs_nothing_but_a_warning(make_pipe, stock, compiler, monkeypatch, caplog):
    def fail(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(compiled_blocks, "BACKEND", fail)
    pipe = make_pipe(compile=True)
    (warning,) = warnings_of(caplog)
    assert "no C++ compiler was found" in warning
    call = {**CALLS[1], "output_type": "latent"}
    assert_latents_equal(pipe(**arguments(call, 0)).images, stock(**arguments(call, 0)).images)


def test_anything_but_a_truth_value_is_refused(make_pipe):
    with pytest.raises(ConfigError, match="compile='yes' must be True or False"):
        make_pipe(compile="yes")


# ---------------------------------------------------------------------- the real compiler


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # its import
def test_the_real_compiler_draws_the_same_picture_and_leaves_no_process(make_pipe, stock, caplog):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.INFO):
        pipe = make_pipe(compile=True)
    assert "compiled the transformer's blocks in" in caplog.text
    assert [child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()] == []
    calls = [arguments({**CALLS[n], "num_inference_steps": 2}, n, output_type="latent") for n in (0, 1)]
    outputs = pipe.generate_batch(calls)
    for seed, output in enumerate(outputs.values()):
        call = {**CALLS[seed], "num_inference_steps": 2, "output_type": "latent"}
        assert_latents_equal(output.latents, stock(**arguments(call, seed)).images)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
