"""`diffusers-continuous env`: what a report of a problem should say about the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from .arguments import ArgumentParser

PACKAGES = ("diffusers-continuous", "torch", "diffusers", "transformers", "accelerate", "safetensors", "peft")


def main(argv: Sequence[str]) -> int:
    ArgumentParser(
        prog="diffusers-continuous env", description="Prints versions, device and attention backends."
    ).parse_all(argv)
    lines = list(_lines())
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        yield package, _version(package)
    yield "device", _device()
    yield "cpu", f"{os.cpu_count()} cores, {_num_threads()} torch threads"
    from diffusers_continuous.attention import available_backends

    for name, reason in available_backends().items():
        yield f"attention {name}", "usable" if reason is None else f"not usable: {reason}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    import torch

    from .loading import best_device

    device = best_device()
    return f"{device.type} ({torch.cuda.get_device_name()})" if device.type == "cuda" else device.type


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
