"""Where hook libraries hang on a module and what lies under their hooks. Knows modules, no model.

Accelerate's hooks and diffusers' hooks both replace `module.forward` on the instance and keep what was there before;
PyTorch's own lie beside it. Whatever was installed first, the innermost forward is in one of a few known places.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.hooks import CpuOffload
from torch import nn

from .errors import UnsupportedModelError


def set_innermost_forward(module: nn.Module, forward: Callable[..., Any], stock: Callable[..., Any]) -> None:
    """Put `forward` where the `stock` one is, under whatever hooks are there; hooks that come later wrap it.

    Raises:
        UnsupportedModelError: when something else has replaced the stock forward.
    """
    slots = list(_forward_slots(module))
    found = [getattr(_get(holder, slot), "__func__", None) for holder, slot in slots]
    if forward in found:
        return
    for (holder, slot), function in zip(slots, found, strict=True):
        if function is stock:
            _set(holder, slot, types.MethodType(forward, module))
            return
    if slots or type(module).forward is not stock:
        raise UnsupportedModelError(
            f"{type(module).__name__}.forward was replaced by something else; continuous batching needs the stock one"
        )
    module.__dict__["forward"] = types.MethodType(forward, module)


def restore_forward(module: nn.Module, forward: Callable[..., Any], stock: Callable[..., Any]) -> None:
    """Put the `stock` forward back where `set_innermost_forward` put `forward`, under whatever hooks are there now."""
    for holder, slot in list(_forward_slots(module)):
        if getattr(_get(holder, slot), "__func__", None) is forward:
            if holder is module.__dict__ and slot == "forward":
                del module.__dict__["forward"]
            else:
                _set(holder, slot, types.MethodType(stock, module))


def is_bare(module: nn.Module, forward: Callable[..., Any] | None = None) -> bool:
    """True when calling `module` runs its class's forward (or `forward`, set innermost) and nothing beside it."""
    if "_hf_hook" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        return False
    registry = module.__dict__.get("_diffusers_hook")
    if registry is not None and registry.hooks:
        return False
    own = module.__dict__.get("forward")  # removed hooks leave the stock forward there
    return own is None or getattr(own, "__func__", own) in (type(module).forward, forward)


def has_stateful_hooks(module: nn.Module) -> bool:
    """True when a diffusers hook on `module` itself remembers something from one call to the next, like a cache."""
    registry = module.__dict__.get("_diffusers_hook")
    return registry is not None and any(hook._is_stateful for hook in registry.hooks.values())


def model_offload_hook(module: nn.Module) -> CpuOffload | None:
    """The hook that `enable_model_cpu_offload` put on a component, whichever pipeline it was called on."""
    hook = module.__dict__.get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        if isinstance(part, CpuOffload):
            return part
    return None


def _forward_slots(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every place where a hook library keeps a forward of `module`: accelerate's, then diffusers'."""
    for name in ("forward", "_old_forward"):
        if name in module.__dict__:
            yield module.__dict__, name
    registry = module.__dict__.get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        for name in ("original_forward", "forward"):
            if getattr(reference, name) is not None:
                yield reference, name


def _get(holder: Any, slot: str) -> Any:
    return holder[slot] if isinstance(holder, dict) else getattr(holder, slot)


def _set(holder: Any, slot: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[slot] = value
    else:
        setattr(holder, slot, value)
