"""Captions to what the decoder's network reads: Gemma-2's last hidden states, chosen as in the reference.

The caption follows an instruction, the one that Sana uses too; a fixed number of positions is kept, filling included,
and the network gets no mask. Knows nothing of pictures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import RequestError


@functools.cache
def sana_instruction() -> str:
    """What released decoders put before every caption: diffusers ships it with Sana, as lines, quoted otherwise."""
    from diffusers import SanaPipeline

    lines = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    return "\n".join(lines).replace("'Enhanced prompt'", '"Enhanced prompt"')


def repeat_captions(captions: str | Sequence[str], batch: int) -> list[str]:
    """One caption per row; a single string is every row's.

    Raises:
        RequestError: for any other number of captions.
    """
    if isinstance(captions, str):
        return [captions] * batch
    if len(captions) != batch:
        raise RequestError(f"{len(captions)} captions do not fit {batch} latents")
    return list(captions)


@torch.no_grad()
def encode_captions(
    text_encoder: Any,
    tokenizer: Any,
    captions: Sequence[str],
    num_positions: int = 300,
    instruction: str | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """(captions, num_positions, hidden) float32: the first position and the caption's, filled up and cut off.

    The attention mask hides the filling from the caption, but the filling's own states are kept: the network was
    trained with them. `instruction` is `sana_instruction()` unless given. Soft-capped attention scores need the eager
    attention, to which the encoder is switched.
    """
    instruction = sana_instruction() if instruction is None else instruction
    num_before = len(tokenizer(instruction).input_ids)  # with the token that begins every text
    tokens = tokenizer(
        [instruction + caption for caption in captions],
        padding="max_length",
        padding_side="right",
        truncation=True,
        max_length=num_before + num_positions - 2,
        return_tensors="pt",
    ).to(device or text_encoder.device)
    if text_encoder.config._attn_implementation != "eager":
        text_encoder.set_attn_implementation("eager")
    hidden = text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False)[0]
    # From the instruction's last token on: its trailing space may have become part of the caption's first word.
    return torch.cat([hidden[:, :1], hidden[:, num_before - 1 :]], 1).float()
