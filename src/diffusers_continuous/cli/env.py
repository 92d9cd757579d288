"""`diffusers-continuous env`: what a report of a problem should say about the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from .arguments import ArgumentParser

PACKAGES = ("diffusers-continuous", "torch", "diffusers", "transformers", "accelerate", "safetensors", "peft")
QWEN_IMAGE_HEAD_DIM = 128


def main(argv: Sequence[str]) -> int:
    """Print one fact a line; the exit code."""
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
    from diffusers_continuous.devices import best_device, default_dtype, describe

    device = best_device()
    yield "device", describe(device)
    yield "cpu", f"{os.cpu_count()} cores, {_num_threads()} torch threads"
    from diffusers_continuous.attention import AttentionTask, available_backends, choose_backend

    task = AttentionTask(device, default_dtype(device), QWEN_IMAGE_HEAD_DIM)
    for name, reason in available_backends(task).items():
        yield f"attention {name}", "usable" if reason is None else f"not usable: {reason}"
    yield "attention auto", choose_backend(task)[1]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
