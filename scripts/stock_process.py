"""The stock pipeline in a process of its own, as whoever has no engine runs it; its requests, and its way to decode.

In one process with the engine it would be handicapped: PyTorch keeps a team of threads for every thread that computes.
With more than one team there are more threads than cores, OpenMP then lets them sleep between operations, and waking
them takes as long as an operation of a small model does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import QwenImagePipeline

from benchmarking import quiet_libraries
from diffusers_continuous.cli.stock_call import StockCall


class BenchRequest(StockCall):
    """One picture to draw, from its prompt or from embeddings."""

    def latent_arguments(self, embeds: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The same call with embeddings going in and latents coming out."""
        return {
            **self.arguments(),
            "prompt": None,
            "negative_prompt": None,
            "output_type": "latent",
            **embeds,
        }


@torch.no_grad()
def decode_with_vae(pipe: QwenImagePipeline, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Packed latents (batch, tokens, channels) to pixels (batch, 3, height, width) in -1..1.

    These are the lines of the stock pipeline's `__call__` after its last step.
    """
    vae = pipe.vae
    latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor).to(vae.dtype)
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
    return vae.decode(latents / inverse_std + mean, return_dict=False)[0][:, :, 0]


class StockProcess:
    """Draws one request after another, as fast as it can; idle in between."""

    def __init__(self, source: str, dtype: torch.dtype, device: torch.device, threads: int | None = None) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, source, dtype, device, threads)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def draw(self, requests: Sequence[BenchRequest]) -> tuple[list[np.ndarray], list[float]]:
        """The pictures, and how many seconds each took."""
        return self._ask("draw", requests)

    def denoise_s(self, requests: Sequence[BenchRequest]) -> float:
        """Seconds from embeddings to latents, all requests together."""
        return self._ask("denoise", requests)

    def encode(self, requests: Sequence[BenchRequest]) -> list[dict[str, np.ndarray]]:
        """What `encode_prompt` makes of them, by the names of the call's arguments."""
        return self._ask("encode", requests)

    def close(self) -> None:
        """Let the process end."""
        self._connection.close()
        self._process.join()

    def _ask(self, what: str, requests: Sequence[BenchRequest]) -> Any:
        self._connection.send((what, list(requests)))
        return self._connection.recv()


@torch.no_grad()
def _serve(connection: Any, source: str, dtype: torch.dtype, device: torch.device, threads: int | None) -> None:
    quiet_libraries()
    if threads:
        torch.set_num_threads(threads)
    pipe = QwenImagePipeline.from_pretrained(source, dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    while True:
        try:
            what, requests = connection.recv()
        except EOFError:
            return
        if what == "draw":
            timed = [_draw(pipe, request.arguments()) for request in requests]
            connection.send(([np.asarray(image) for image, _ in timed], [seconds for _, seconds in timed]))
        elif what == "denoise":
            calls = [request.latent_arguments(_embeds(pipe, request)) for request in requests]
            connection.send(sum(_draw(pipe, call)[1] for call in calls))
        else:
            found = [_embeds(pipe, request) for request in requests]
            connection.send([{name: _to_numpy(value) for name, value in each.items()} for each in found])


def _draw(pipe: QwenImagePipeline, call: dict[str, Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    image = pipe(**call).images[0]
    return image, time.perf_counter() - start


def _embeds(pipe: QwenImagePipeline, request: BenchRequest) -> dict[str, torch.Tensor]:
    device = pipe.device
    embeds, mask = pipe.encode_prompt(request.prompt, device=device)
    found = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
    if request.is_guided:
        embeds, mask = pipe.encode_prompt(" ", device=device)
        found |= {"negative_prompt_embeds": embeds, "negative_prompt_embeds_mask": mask}
    return {name: value for name, value in found.items() if value is not None}


def _to_numpy(value: torch.Tensor) -> np.ndarray:
    return (value.float() if value.is_floating_point() else value).cpu().numpy()
