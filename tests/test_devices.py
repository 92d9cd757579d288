"""What differs between devices is asked in one place; and no step waits for the device before its end."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import diffusers_continuous
from conftest import generator
from diffusers_continuous import devices
from diffusers_continuous.batch import InputBatch

CPU = torch.device("cpu")


def fake_module(**members):
    """Counts of an accelerator's module whose work allocates 700 bytes for a while and keeps 100."""
    told = []
    return types.SimpleNamespace(
        told=told,
        synchronize=lambda *device: told.append(("synchronize", device)),
        empty_cache=lambda *device: told.append(("empty_cache", device)),
        **members,
    )


@pytest.fixture
def npu(monkeypatch):
    """An Ascend device as far as its module tells; its `torch.device` cannot be made without the package."""
    module = fake_module(
        device=lambda device: devices.contextlib.nullcontext(device),
        mem_get_info=lambda device: (3000, 4000),
        memory_allocated=lambda device: 1000,
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: 1700,
        max_memory_reserved=lambda device: 2000,
        get_device_name=lambda device: "Ascend910B",
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: getattr(torch, device.type))
    return types.SimpleNamespace(type="npu", index=0)


@pytest.fixture
def mps(monkeypatch):
    """An Apple GPU: one device, memory of the machine, no peak kept."""
    taken = [1000]
    module = fake_module(
        recommended_max_memory=lambda: 8000, driver_allocated_memory=lambda: taken[0], taken=taken, is_available=None
    )
    monkeypatch.setattr(torch, "mps", module)
    return torch.device("mps")


def test_a_device_of_a_package_tells_by_its_own_module(npu):
    assert devices.describe(npu) == "npu (Ascend910B)"
    assert devices.memory_info(npu) == (3000, 4000)
    assert devices.peak_bytes(npu, lambda: None) == 700
    assert devices.peak_reserved_bytes(npu) == 2000
    with devices.current(npu) as device:
        assert device is npu
    devices.synchronize(npu)
    devices.empty_cache(npu)
    assert torch.npu.told == [("synchronize", (npu,)), ("empty_cache", ())]
    assert devices.default_dtype(npu) is torch.bfloat16
    assert devices.is_pinning_useful(npu)
    assert devices.compute_capability(npu) is None


def test_mps_is_one_device_with_the_machines_memory(mps):
    assert devices.memory_info(mps) == (7000, 8000)
    assert devices.peak_bytes(mps, lambda: torch.mps.taken.__setitem__(0, 1700)) == 700
    assert devices.peak_reserved_bytes(mps) == 1700
    with devices.current(mps):
        devices.synchronize(mps)
    assert torch.mps.told == [("empty_cache", ()), ("synchronize", ())]
    assert not devices.is_pinning_useful(mps)
    assert devices.describe(mps) == "mps"


def test_a_cpu_is_the_host():
    free, total = devices.memory_info(CPU)
    assert 0 < free <= total
    assert devices.is_host(CPU)
    assert devices.default_dtype(CPU) is torch.float32
    assert devices.describe(CPU) == "cpu"
    devices.synchronize(CPU)
    devices.empty_cache(CPU)
    assert devices.peak_reserved_bytes(CPU) is None


def test_a_device_whose_package_is_missing_says_what_to_install(pipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    for move in (pipe.to, lambda device: pipe.enable_model_cpu_offload(device=device)):
        with pytest.raises(ImportError, match=r"torch_npu is not installed: pip install 'diffusers-continuous\[npu\]'"):
            move("npu")
    with pytest.raises(ImportError, match="npu"):
        pipe.to("npu:1")
    pipe.to("cpu")


def test_a_package_that_brings_the_device_is_imported(monkeypatch):
    made = []
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "device", lambda name: made.append(name) or name)
    assert devices.load_device("npu:0") == "npu:0"
    assert made == ["npu:0"]


def test_nobody_else_asks_what_kind_of_device_it_is():
    """Comparing two devices is fine; comparing one with a name is not, and neither is a module of one kind."""
    found = []
    for path in Path(diffusers_continuous.__file__).parent.rglob("*.py"):
        if path.name == "devices.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node)
            is_name = isinstance(node, ast.Compare) and any(
                isinstance(part, ast.Constant) and part.value in ("cpu", "cuda", "npu", "mps", "xpu")
                for part in (node.left, *node.comparators)
            )
            is_module = isinstance(node, ast.Attribute) and text in (
                "torch.cuda",
                "torch.mps",
                "torch.xpu",
                "torch.npu",
            )
            if is_name or is_module:
                found.append(f"{path.name}:{node.lineno}: {text}")
    assert found == []


# ---------------------------------------------------------------------- waiting


WAITS = {
    getattr(torch.Tensor, name)
    for name in ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "nonzero", "numpy", "tolist")
}
WAITING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")


class NoWaiting(TorchFunctionMode):
    """Fails at what waits for a device, when it is asked for in Python."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in WAITS, f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


class NoWaitingInside(TorchDispatchMode):
    """Fails at what waits for a device, when an operation does it inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_waiting = name in WAITING_OPERATIONS or (
            name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        )
        assert not is_waiting, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def prepared_rows(pipe, **options):
    """Two rows, one of them guided, that a step can be taken of, and their model."""
    model = pipe.init_continuous_batching(**options).runner._model
    calls = [
        {"prompt": "a ring", "negative_prompt": " ", "height": 64, "width": 96},
        {"prompt": "a red star", "height": 64, "width": 64},
    ]
    rows = [row for i, call in enumerate(calls) for row in pipe._make_request(**call, generator=generator(i)).rows]
    model.prepare_encode(rows)
    model.prepare_denoise(rows)
    return rows, model


def take_step(rows, model, composition):
    """What the runner does between two looks at the result."""
    batch = InputBatch.make(rows, model, composition)
    for row, prediction in zip(rows, model.denoise_step(batch), strict=True):
        model.step_scheduler([row], prediction[None])
    return batch.composition


def test_no_step_waits_for_the_device(pipe):
    with torch.no_grad():
        rows, model = prepared_rows(pipe)
        composition = take_step(rows, model, None)
        with NoWaiting(), NoWaitingInside():
            take_step(rows, model, composition)
    assert [row.step for row in rows] == [2, 2]


@pytest.mark.parametrize("wait", [lambda x: bool(x[0] > 0), lambda x: x.tolist(), lambda x: x[x > 0]])
def test_waiting_would_be_seen(wait):
    with NoWaiting(), NoWaitingInside(), pytest.raises(AssertionError, match="waits for the device"):
        wait(torch.arange(3))


def test_a_whole_step_waits_once_at_its_end(make_pipe):
    """However many rows, and also when some are in their last step."""
    pipe = make_pipe(max_requests_per_batch=8)
    waits = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in WAITS:
                waits[-1].append(func.__name__)
            return func(*args, **(kwargs or {}))

    runner = pipe._engine.runner
    denoise = runner._denoise

    def counted(rows, errors):
        waits.append([])
        with Counting():
            denoise(rows, errors)

    runner._denoise = counted
    pipe.generate_batch([{"prompt": p, "num_inference_steps": n} for p, n in (("a", 2), ("b", 4))], height=64, width=64)
    assert len(waits) >= 4
    assert all(each == ["tolist"] for each in waits), waits


@pytest.mark.cuda
@pytest.mark.parametrize("attention_backend", ["sdpa", "torch_varlen"])
def test_no_step_waits_for_a_card(make_pipe, attention_backend):
    pipe = make_pipe(dtype=torch.bfloat16)
    pipe.to("cuda")
    with torch.no_grad():
        rows, model = prepared_rows(pipe, attention_backend=attention_backend)
        composition = take_step(rows, model, None)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            take_step(rows, model, composition)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_small_tensors_of_any_dtype_travel_in_one_copy(monkeypatch):
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(5),
        torch.tensor([[0.5], [1.5]]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(3, dtype=torch.int32),
    ]
    copies = []
    to = torch.Tensor.to
    monkeypatch.setattr(devices, "is_host", lambda device: False)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: copies.append(self) or to(self, *args, **kwargs)
    )
    there = devices.upload(tensors, torch.device("cpu"))
    assert len(copies) == 1
    for ours, expected in zip(there, tensors, strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)
