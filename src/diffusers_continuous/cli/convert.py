"""`diffusers-continuous convert-pid`: an official PiD checkpoint becomes a folder that `PiDDecoder` loads."""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from diffusers_continuous.errors import ConfigError
from diffusers_continuous.pid.checkpoints import (
    CHECKPOINTS,
    FILE_NAME,
    HUB_REPO,
    LATENTS,
    SAME_LATENTS,
    Checkpoint,
    find_checkpoint,
)

from .arguments import ArgumentParser, choice_reader, option_type

if TYPE_CHECKING:
    from diffusers_continuous.pid.pipeline import PiDDecoder

DESCRIPTION = f"""\
Turns an official checkpoint of the Pixel Diffusion Decoder into a folder that PiDDecoder.from_pretrained loads.

SOURCE is a .pth or .safetensors file, a folder laid out like the repository {HUB_REPO} (or that holds just a
{FILE_NAME}), or a hub repository, of which only the file that is needed is downloaded. The options say
which checkpoint it is, since its tensors do not say all of it. Every tensor that the network has must be there, and no
other."""

EPILOG = """\
The weights have a licence of their own, reported to exclude commercial use; this program's licence does not cover them.

exit code: 0 converted; 1 SOURCE or the text encoder cannot be read, or SOURCE is not that checkpoint; 2 a mistake in
the call."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# What reading a file, or the hub, raises: damaged, not tensors alone, not reachable.
READING_ERRORS = (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError)
WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit code, 0 or 1. Exits with 2 at a mistake in the call, before anything is converted."""
    parser = _parser()
    options = parser.parse_all(argv)
    try:
        checkpoint = _checkpoint(options)
        _check_places(options)
    except ConfigError as error:
        parser.error(str(error))
    print(f"converting {options.source}: {checkpoint}", file=sys.stderr)
    try:
        decoder = convert(options, checkpoint)
        decoder.save_pretrained(options.output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except READING_ERRORS as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        print(f"error: {options.source} cannot be converted: {type(error).__name__}: {reason}", file=sys.stderr)
        return 1
    _report(decoder, options)
    return 0


def convert(options: argparse.Namespace, checkpoint: Checkpoint) -> PiDDecoder:
    """The decoder that `options.source` holds; its network in `options.dtype`, or as the file has it."""
    import torch

    from diffusers_continuous.pid.pipeline import PiDDecoder

    decoder = PiDDecoder.from_original(
        options.source,
        checkpoint.backbone,
        checkpoint.variant,
        checkpoint.checkpoint_type,
        checkpoint.sr_scale,
        text_encoder=options.text_encoder,
    )
    if options.dtype is not None:
        decoder.transformer.to(getattr(torch, DTYPES[options.dtype]))
    return decoder


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="diffusers-continuous convert-pid", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    backbones = sorted([*LATENTS, *SAME_LATENTS])
    variants = sorted({item.variant for item in CHECKPOINTS})
    types = sorted({item.checkpoint_type for item in CHECKPOINTS})
    scales = sorted({str(item.sr_scale) for item in CHECKPOINTS})
    add("source", metavar="SOURCE", help=f"a file, a folder or a hub repository such as {HUB_REPO}")
    add("output", metavar="OUTPUT", type=Path, help="the folder to write; it must be empty or not exist")
    add(
        "--backbone",
        type=option_type(choice_reader("backbone", backbones)),
        default="qwenimage",
        metavar="NAME",
        help=f"whose latents the decoder takes: {', '.join(backbones)} (default: %(default)s)",
    )
    add(
        "--variant",
        type=option_type(choice_reader("variant", variants)),
        default="2kto4k_v1pt5",
        metavar="NAME",
        help=f"sizes and generation: {', '.join(variants)} (default: %(default)s)",
    )
    add(
        "--type",
        type=option_type(choice_reader("type", types)),
        default="distilled",
        metavar="NAME",
        help=f"{' or '.join(types)} (default: %(default)s)",
    )
    add(
        "--sr-scale",
        type=option_type(choice_reader("sr-scale", scales)),
        metavar="N",
        help=f"{' or '.join(scales)} times larger than the VAE's picture (default: the one there is)",
    )
    add(
        "--text-encoder",
        metavar="PATH_OR_REPO",
        help="a Gemma-2-2b-it to put beside the network (default: none; the decoder then takes prompt_embeds)",
    )
    add(
        "--dtype",
        type=option_type(choice_reader("dtype", DTYPES)),
        metavar="NAME",
        help=f"{' or '.join(DTYPES)}: of the network's weights (default: as in the file, which is bf16)",
    )
    return parser


def _checkpoint(options: argparse.Namespace) -> Checkpoint:
    scale = None if options.sr_scale is None else int(options.sr_scale)
    return find_checkpoint(options.backbone, options.variant, options.type, scale)


def _check_places(options: argparse.Namespace) -> None:
    """Refuse a source that can be neither a path nor a repository, and an output that is in use.

    Raises:
        ConfigError: names the place.
    """
    source, output = options.source, options.output
    could_be_repository = _REPOSITORY.fullmatch(source) and not source.endswith(WEIGHT_SUFFIXES)
    if not Path(source).exists() and not could_be_repository:
        raise ConfigError(f"SOURCE {source!r} is not there, and is no name of a hub repository such as {HUB_REPO!r}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"OUTPUT {str(output)!r} is in use: name a folder that is empty or does not exist")


def _report(decoder: PiDDecoder, options: argparse.Namespace) -> None:
    count = sum(parameter.numel() for parameter in decoder.transformer.parameters())
    tensors = len(decoder.transformer.state_dict())
    dtype = str(decoder.transformer.dtype).removeprefix("torch.")
    print(f"{tensors} tensors, {count:,} parameters, {dtype}", file=sys.stderr)
    if decoder.text_encoder is None:
        print("without a text encoder: call it with prompt_embeds, or convert with --text-encoder", file=sys.stderr)
    print(options.output)
