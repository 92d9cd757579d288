"""Attention backends: each keeps rows apart, is told what its kernel needs, and is refused where it cannot run."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import sys
import types

import pytest
import torch

from attention_fakes import FAKES, fake_varlen_attn, installed
from conftest import assert_latents_equal, generator, load_stock
from diffusers_continuous import ConfigError, UnsupportedModelError, attention, devices
from diffusers_continuous.attention import (
    ATTENTION_BACKENDS,
    AttentionTask,
    BackendSpec,
    available_backends,
    choose_backend,
    get_backend,
)
from diffusers_continuous.attention.varlen import Sequences
from diffusers_continuous.models.interface import JointRows, Run

CPU_TASK = AttentionTask(torch.device("cpu"), torch.float32, 32)
CUDA_TASK = AttentionTask(torch.device("cuda"), torch.bfloat16, 128)
LENGTHS = ((5,), (3, 3, 3), (4, 9, 9, 1))


def rows_of(lengths, device="cpu", valid=None):
    """Rows of these lengths; `valid` of (rows, length) makes them a padded batch."""
    starts = [0, *itertools.accumulate(lengths)]
    runs, first = [], 0
    for length, group in itertools.groupby(lengths):
        count = len(list(group))
        runs.append(Run(starts[first], starts[first + count], first, count, length))
        first += count
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return JointRows(tuple(runs), tuple(lengths), cu_seqlens, None if valid is None else valid.flatten().to(device))


def random_qkv(tokens, heads=2, head_dim=32, dtype=torch.float32, device="cpu"):
    """Values of a size at which every token matters, so that one seen too many or too few shows."""
    draw = generator(tokens)
    return [torch.randn(tokens, heads, head_dim, generator=draw).to(device, dtype) for _ in range(3)]


def exact(q, k, v, lengths):
    """Softmax attention of each row in float64, written down plainly."""
    parts, start = [], 0
    for length in lengths:
        a, b, c = (x[start : start + length].double().transpose(0, 1) for x in (q, k, v))
        weights = (a @ b.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1)
        parts.append((weights @ c).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(parts)


def fake_backend(name, dtype=torch.float32):
    return get_backend(FAKES[name], AttentionTask(torch.device("cpu"), dtype, 32))


# ---------------------------------------------------------------------- what they compute


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", FAKES)
def test_a_backend_attends_inside_each_row(name, lengths):
    q, k, v = random_qkv(sum(lengths))
    with installed(name, float32=True):
        out = fake_backend(name).forward(q, k, v, rows_of(lengths))
    assert out.shape == (sum(lengths), 64)
    assert (out - exact(q, k, v, lengths)).abs().max() <= 1e-5


@pytest.mark.parametrize("garbage", [0.0, 1e4, float("nan")])
@pytest.mark.parametrize("name", FAKES)
def test_padding_is_seen_by_nobody_and_comes_back_finite(name, garbage):
    valid = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 1, 1]], dtype=torch.bool)
    q, k, v = random_qkv(18)
    keep = valid.flatten()
    expected = exact(q[keep], k[keep], v[keep], (4, 6, 3))
    for x in (q, k, v):
        x[~keep] = garbage
    with installed(name, float32=True) as calls:
        out = fake_backend(name).forward(q, k, v, rows_of((6, 6, 6), valid=valid))
    assert len(calls) == 1
    assert (out[keep] - expected).abs().max() <= 1e-5
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", FAKES)
def test_a_batch_is_worked_out_once_and_every_forward_is_one_call(name):
    rows = rows_of((4, 9))
    q, k, v = random_qkv(13)
    with installed(name, float32=True) as calls:
        backend = fake_backend(name)
        backend.forward(q, k, v, rows)
        kept = Sequences.of(rows)
        backend.forward(q, k, v, rows)
        assert Sequences.of(rows) is kept
        assert len(calls) == 2
    assert (kept.ends, kept.max_length, kept.token_index) == ((4, 13), 9, None)
    assert kept.cu_seqlens is rows.cu_seqlens


CALLS = [
    {"prompt": "a ring", "height": 64, "width": 96, "negative_prompt": " ", "true_cfg_scale": 2.0},
    {"prompt": "a red star on a blue background", "height": 96, "width": 64},
]
COMMON = {"num_inference_steps": 3, "output_type": "latent"}


@pytest.mark.parametrize("name", FAKES)
def test_the_picture_is_the_stock_pipelines(name, make_pipe, stock):
    with installed(name, float32=True) as calls:
        pipe = make_pipe(attention_backend=FAKES[name])
        results = pipe.generate_batch(
            [{**CALLS[0], "generator": generator(0)}, {**CALLS[1], "generator": generator(1)}], **COMMON
        )
    num_layers = pipe.transformer.config.num_layers
    num_steps = sum(step.kind == "denoise" for step in pipe._engine.stats().recent_steps)
    assert len(calls) == num_layers * num_steps
    for seed, (call, output) in enumerate(zip(CALLS, results.values(), strict=True)):
        assert_latents_equal(output.latents, stock(**call, **COMMON, generator=generator(seed)).images)


def test_in_bf16_it_is_as_close_to_the_exact_picture_as_the_stock_pipeline_in_bf16(make_pipe, stock):
    call = {**CALLS[0], **COMMON, "num_inference_steps": 6}
    # Of one picture the error is a matter of chance: a shape's edge falls here or there.
    noises = torch.randn(8, 1, 24, 64, generator=generator(0)).bfloat16()
    in_bf16 = load_stock(torch.bfloat16)
    right = torch.cat([stock(**call, latents=noise.float()).images for noise in noises])
    theirs = torch.cat([in_bf16(**call, latents=noise).images for noise in noises])
    with installed("flash"):
        pipe = make_pipe(dtype=torch.bfloat16, attention_backend="flash")
        ours = torch.cat([pipe(**call, latents=noise).images for noise in noises])
    error, stock_error = ((images.float() - right).pow(2).mean().sqrt() for images in (ours, theirs))
    print(f"rms error in bf16: {error:.4f}, stock {stock_error:.4f}")
    assert error <= 1.5 * stock_error


# ---------------------------------------------------------------------- the fakes


def test_the_fake_has_the_signature_of_torchs_kernel():
    from torch.nn.attention.varlen import varlen_attn

    real, fake = (inspect.signature(each).parameters for each in (varlen_attn, fake_varlen_attn((), [])))
    assert [(p.name, p.kind) for p in real.values()] == [(p.name, p.kind) for p in fake.values()]


STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("name", ["flash", "flash3", "torch_varlen"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({0: torch.zeros(5, 2, 32)}, "only support fp16 and bf16"),
        ({1: torch.zeros(5, 2, 32, dtype=torch.float16)}, "the same dtype"),
        ({3: STARTS.long()}, "int32"),
        ({3: torch.tensor([0, 2, 4], dtype=torch.int32)}, "not all tokens"),
        ({5: torch.tensor(3)}, "on the host"),
        ({5: 2}, "left out"),
    ],
)
def test_a_fake_refuses_what_flash_kernels_refuse(name, changes, text):
    arguments = [*random_qkv(5, dtype=torch.bfloat16), STARTS, STARTS, 3, 3]
    with installed(name):
        kernel = fake_backend(name, torch.bfloat16)._kernel
        kernel(*arguments)
        for index, value in changes.items():
            arguments[index] = value
        with pytest.raises(RuntimeError, match=text):
            kernel(*arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"actual_seq_qlen": STARTS}, "int"),
        ({"actual_seq_qlen": [0, 2, 5]}, "without 0"),
        ({"actual_seq_kvlen": [2, 3]}, "not all tokens"),
        ({"actual_seq_kvlen": [torch.tensor(2), torch.tensor(5)]}, "on the host"),
        ({"atten_mask": torch.zeros(2, 3, dtype=torch.bool)}, "no mask of shape"),
        ({"atten_mask": torch.zeros(2, 1, 1, 3, dtype=torch.bool)}, "no mask of shape"),
        ({"query": torch.zeros(2, 5, 32).transpose(0, 1)}, "contiguous"),
        ({"head_num": 3}, "head_num"),
    ],
)
def test_a_fake_refuses_what_ascends_kernel_refuses(changes, text):
    q, k, v = random_qkv(5)
    arguments = {"query": q, "key": k, "value": v, "head_num": 2, "input_layout": "TND", "scale": 0.1}
    arguments |= {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
    with installed("npu"):
        kernel = fake_backend("npu")._kernel
        kernel(**arguments)
        with pytest.raises(RuntimeError, match=text):
            kernel(**{**arguments, **changes})


# ---------------------------------------------------------------------- which one can be used


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"attention_backend='flsh' .*'auto', 'flash', 'npu', 'sdpa', 'torch_varlen'"):
        get_backend("flsh", CPU_TASK)


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
        ("flash", "flash_attn", r"flash-attn is not installed: pip install 'diffusers-continuous\[flash\]'"),
        ("npu", "torch_npu", r"torch_npu is not installed: pip install 'diffusers-continuous\[npu\]'"),
        ("torch_varlen", "torch.nn.attention.varlen", r"pip install 'torch>=2.10'"),
    ],
)
def test_a_backend_whose_package_is_missing_says_what_to_install(name, module, text, monkeypatch, make_pipe):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"attention_backend='{name}' cannot be used: .*{text}"):
        make_pipe(attention_backend=name)
    task = AttentionTask(torch.device("meta"), torch.bfloat16, 128)
    reason = available_backends(task)[name]
    assert reason is not None
    assert "pip install" in reason


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"__version__": "2.5.8"}, r"flash-attn 2.5.8 is too old, 2.7 is needed: pip install .*\[flash\]"),
        (None, r"flash-attn cannot be imported \(undefined symbol: _ZN3c10\); install it anew: .*\[flash\]"),
    ],
)
def test_a_package_of_no_use_says_why(members, text, monkeypatch):
    def broken(name):
        raise OSError("undefined symbol: _ZN3c10\nand more")

    if members is None:
        monkeypatch.setattr("diffusers_continuous.extras.importlib.import_module", broken)
    else:
        module = types.ModuleType("flash_attn")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(devices, "compute_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=text):
        get_backend("flash", CUDA_TASK)


@pytest.mark.parametrize(
    ("name", "task", "text"),
    [
        ("torch_varlen", CPU_TASK, "it runs on cuda, not on cpu"),
        ("flash", AttentionTask(torch.device("cuda"), torch.float32, 128), "it takes float16 or bfloat16, not float32"),
        ("flash", AttentionTask(torch.device("cuda"), torch.bfloat16, 320), "head_dim of at most 256, not 320"),
        ("torch_varlen", AttentionTask(torch.device("cuda"), torch.bfloat16, 44), "a multiple of 8, not 44"),
    ],
)
def test_a_backend_is_refused_for_what_its_kernel_does_not_take(name, task, text, monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=text):
        get_backend(name, task)


def test_a_card_that_is_too_old_is_told_so(monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"it needs compute capability 8\.0, this card has 7\.5"):
        get_backend("torch_varlen", CUDA_TASK)


def test_a_backend_that_mixes_rows_up_is_refused(monkeypatch):
    mixing = types.SimpleNamespace(name="mixing", isolates_rows=False)
    monkeypatch.setitem(ATTENTION_BACKENDS, "mixing", BackendSpec(lambda device: mixing))
    with pytest.raises(UnsupportedModelError, match="cannot keep the rows of a batch apart"):
        get_backend("mixing", CPU_TASK)


@pytest.mark.parametrize(
    ("fakes", "task", "expected"),
    [
        ((), CPU_TASK, "sdpa"),
        ((), AttentionTask(torch.device("meta"), torch.bfloat16, 128), "sdpa"),
        (("flash",), CUDA_TASK, "flash"),
        ((), CUDA_TASK, "torch_varlen"),
        (("flash",), AttentionTask(torch.device("cuda"), torch.float32, 128), "sdpa"),
    ],
)
def test_auto_picks_by_device_and_says_why(fakes, task, expected, monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda device: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    if fakes:
        with installed(*fakes):
            backend, why = choose_backend(task)
    else:
        backend, why = choose_backend(task)
    assert backend.name == expected
    assert why.startswith(f"attention_backend='auto' is {expected} ({task.device.type}, ")
    for passed_over in {"cuda": ("flash", "torch_varlen")}.get(task.device.type, ()):
        if passed_over == expected:
            break
        assert f"not {passed_over}: " in why


def test_auto_on_an_npu_is_ascends_kernel(monkeypatch):
    npu = types.SimpleNamespace(type="npu")
    with installed("npu"):
        assert choose_backend(AttentionTask(npu, torch.bfloat16, 128))[0].name == "npu"
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    backend, why = choose_backend(AttentionTask(npu, torch.bfloat16, 128))
    assert backend.name == "sdpa"
    assert "diffusers-continuous[npu]" in why


def test_auto_tells_the_log_once(caplog):
    attention._tell_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="diffusers_continuous.attention"):
        for _ in range(3):
            get_backend("auto", CPU_TASK)
    assert caplog.messages == ["attention_backend='auto' is sdpa (cpu, float32, head_dim 32)"]


def test_a_backend_is_chosen_again_when_the_pipeline_has_changed(make_pipe):
    pipe = make_pipe(fresh=True, attention_backend="auto")
    model, seen = pipe._engine.runner._model, []
    choose = model._choose_attention
    model._choose_attention = lambda task: seen.append(task) or choose(task)
    pipe("a ring", height=64, width=64, num_inference_steps=2, output_type="latent")
    assert seen == []  # it was chosen when the engine was made
    pipe.to(torch.bfloat16)
    pipe("a ring", height=64, width=64, num_inference_steps=2, output_type="latent")
    assert [(task.device.type, task.dtype, task.head_dim) for task in seen] == [("cpu", torch.bfloat16, 32)]


def test_a_backend_that_the_changed_pipeline_cannot_use_ends_only_requests(make_pipe):
    with installed("flash", float32=True):
        pipe = make_pipe(fresh=True, attention_backend="flash")
    pipe.to(torch.bfloat16)  # and the backend is gone
    (output,) = pipe.generate_batch(
        [{"prompt": "a ring", "height": 64, "width": 64, "num_inference_steps": 2}]
    ).values()
    assert "attention_backend='flash' cannot be used" in str(output.error)
    assert pipe._engine.fatal_error is None


# ---------------------------------------------------------------------- on the real thing


def _compare_on_device(name):
    device = devices.best_device()
    task = AttentionTask(device, torch.bfloat16, 128)
    reason = available_backends(task)[name]
    if reason is not None:
        pytest.skip(reason)
    valid = torch.rand(3, 300, generator=generator(0)) < 0.7
    valid[:, 0] = True
    for rows in (rows_of((77, 300, 300, 1030), device), rows_of((300,) * 3, device, valid)):
        lengths = rows.lengths if rows.valid is None else valid.sum(1).tolist()
        keep = torch.ones(sum(rows.lengths), dtype=torch.bool) if rows.valid is None else valid.flatten()
        q, k, v = random_qkv(sum(rows.lengths), 4, 128, torch.bfloat16, device)
        out = get_backend(name, task).forward(q, k, v, rows).cpu()
        expected = exact(*(x.cpu()[keep] for x in (q, k, v)), lengths)
        assert (out[keep] - expected).abs().max() <= 2e-2  # bfloat16 has three digits


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["flash", "sdpa", "torch_varlen"])
def test_on_a_card(name):
    _compare_on_device(name)


@pytest.mark.npu
@pytest.mark.parametrize("name", ["npu", "sdpa"])
def test_on_an_npu(name):
    _compare_on_device(name)
