"""What a `callback_on_step_end` sees and may change: its own request, as the stock pipeline would show it.

Knows one request and its pipeline; never the engine or other requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .errors import RequestError
from .models.qwen_image import split_embeds
from .request import RequestState

_SHARED = ("vae", "text_encoder", "transformer", "tokenizer", "encode_prompt")


class LockedModel:
    """A component whose calls wait for the runner: the VAE and the text encoder keep state while they run."""

    def __init__(self, model: Any, lock: threading.RLock) -> None:
        self.__dict__.update(_model=model, _lock=lock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the component under the runner's lock."""
        with self._lock:
            return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if not callable(value) or isinstance(value, torch.nn.Module):
            return value

        def locked(*args: Any, **kwargs: Any) -> Any:
            """The component's method, under the runner's lock."""
            with self._lock:
                return value(*args, **kwargs)

        return locked

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name!r} cannot be set inside a callback: other requests use this component too")


class RequestPipelineView:
    """The pipeline as one request sees it: its own noise scheduler and running values, everything else shared.

    Setting `_interrupt` ends this request's denoising now, with its current latents decoded.
    """

    def __init__(self, pipe: Any, state: RequestState, guidance_scale: float | None, lock: threading.RLock) -> None:
        self._pipe = pipe
        self._lock = lock
        self.scheduler = state.rows[0].noise_scheduler
        self._guidance_scale = guidance_scale
        self._attention_kwargs = {} if state.params.lora_scale == 1.0 else {"scale": state.params.lora_scale}
        self._num_timesteps = state.num_steps
        self._current_timestep: Any = None
        self._interrupt = False

    guidance_scale = property(lambda self: self._guidance_scale)
    attention_kwargs = property(lambda self: self._attention_kwargs)
    num_timesteps = property(lambda self: self._num_timesteps)
    current_timestep = property(lambda self: self._current_timestep)
    interrupt = property(lambda self: self._interrupt)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._pipe, name)
        return LockedModel(value, self._lock) if name in _SHARED else value


class StepCallback:
    """Runs a caller's `callback_on_step_end` over the stacked rows of its request and takes in what it changed.

    Args:
        function: `callback(pipe, step, timestep, callback_kwargs) -> dict`.
        view: What it sees as the pipeline.
    """

    def __init__(self, function: Callable[..., Any], view: RequestPipelineView) -> None:
        self._function = function
        self._view = view
        self._mask: torch.Tensor | None = None

    def run(self, state: RequestState) -> dict[str, Any]:
        """Call the callback, in the caller's thread; what it returned, and what it edited in place, by name."""
        step = state.step - 1
        timestep = state.rows[0].noise_scheduler.timesteps[step]
        self._view._current_timestep = timestep
        tensors = {"latents": self._latents, "prompt_embeds": self._prompt_embeds}
        handed_out = {name: tensors[name](state) for name in state.params.callback_tensor_inputs}
        versions = {name: tensor._version for name, tensor in handed_out.items()}
        with torch.no_grad():
            returned = self._function(self._view, step, timestep, dict(handed_out)) or {}
        edited = {name: tensor for name, tensor in handed_out.items() if tensor._version != versions[name]}
        return {**edited, **returned}

    def apply(self, state: RequestState, result: dict[str, Any]) -> bool:
        """Put returned tensors back into the rows; True when the callback asked to stop here.

        Raises:
            RequestError: when they do not fit or are not finite.
        """
        if (latents := result.get("latents")) is not None:
            _check(latents, self._latents(state), "latents")
            for row, row_latents in zip(state.rows, latents, strict=True):
                row.latents = row_latents.to(row.latents)
        if (embeds := result.get("prompt_embeds")) is not None:
            before = self._prompt_embeds(state)
            _check(embeds, before, "prompt_embeds")
            for row, text in zip(state.rows, split_embeds(embeds.to(before), self._mask), strict=True):
                row.text = text
        return bool(self._view._interrupt)

    def _latents(self, state: RequestState) -> torch.Tensor:
        return torch.stack([row.latents for row in state.rows])

    def _prompt_embeds(self, state: RequestState) -> torch.Tensor:
        """(rows, tokens, dim), padded with zeros at the tail; remembers which tokens are valid."""
        texts = [row.text for row in state.rows if row.text is not None]
        width = max(text.width for text in texts)
        first = texts[0].embeds
        embeds = first.new_zeros(len(texts), width, first.shape[-1])
        mask = torch.zeros(len(texts), width, dtype=torch.bool, device=first.device)
        for i, text in enumerate(texts):
            places = slice(text.num_tokens) if text.positions is None else list(text.positions)
            embeds[i, places] = text.embeds
            mask[i, places] = True
        self._mask = mask
        return embeds


def _check(given: Any, before: torch.Tensor, name: str) -> None:
    if not isinstance(given, torch.Tensor) or given.shape != before.shape:
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise RequestError(f"the callback returned {name} of {shape}, expected {tuple(before.shape)}")
    if not bool(torch.isfinite(given).all()):
        raise RequestError(f"the callback returned {name} with non-finite values")
