"""Official checkpoints to ours: file formats, names, and a refusal to guess. Downloads only what is asked for."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..errors import ConfigError
from .checkpoints import FILE_NAME, Checkpoint

if TYPE_CHECKING:
    from .modeling import PiDTransformer2DModel

Model = TypeVar("Model", bound=nn.Module)

# Stripped, in this order: of released files, and of older PixelDiT files.
PREFIXES = ("net.", "core.")
# Other networks of the training run that may share the file, and a head that only training used.
OTHER_NETWORKS = ("net_ema.", "fake_score.", "discriminator.", "repa_loss.")
TRAINING_HEAD = "lq_proj.lq_aux_rgb_head."
# Options of the reference network that every released one sets alike: we have no others.
FIXED_OPTIONS: dict[str, Any] = {
    "use_text_rope": True,
    "rope_mode": "ntk_aware",
    "lq_in_channels": 0,
    "lq_inject_mode": "controlnet",
    "enable_ed": False,
}
# Options that only training reads, or that a switched-off part would read.
IGNORED_OPTIONS = {
    "lq_aux_rgb_head",
    "lq_aux_rgb_head_latent_block_idx",
    "zero_init_lq",
    "train_lq_proj_only",
    "repa_encoder_index",
    "num_text_blocks",
    "ed_compress_ratio",
    "ed_depth_per_stage",
    "ed_window_size",
    "ed_num_heads",
    "ed_hidden_size",
    "ed_use_token_shuffle",
}
MAX_NAMED = 20


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options under their official names -> those that `PiDTransformer2DModel` takes.

    Raises:
        ConfigError: for an option that is unknown, or has a value that no released network has.
    """
    from .modeling import PiDTransformer2DModel

    known = set(PiDTransformer2DModel._get_init_keys(PiDTransformer2DModel)) - {"self"}
    for name, value in config.items():
        if name in FIXED_OPTIONS and value != FIXED_OPTIONS[name]:
            raise ConfigError(f"{name}={value!r} is not supported; every released network has {FIXED_OPTIONS[name]!r}")
        if name not in known and name not in FIXED_OPTIONS and name not in IGNORED_OPTIONS:
            raise ConfigError(f"the option {name!r} is not known; choose from {sorted(known)}")
    return {name: value for name, value in config.items() if name in known}


def convert_state_dict(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The decoder's tensors of an official state dict under our names, nothing else; tensors are not copied.

    Raises:
        ConfigError: if a name occurs with and without its prefix.
    """
    converted: dict[str, torch.Tensor] = {}
    for original, tensor in state_dict.items():
        name = original
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        if original.startswith(OTHER_NETWORKS) or name.startswith(TRAINING_HEAD):
            continue
        if name in converted:
            raise ConfigError(f"the checkpoint has {name!r} twice, with and without a prefix")
        converted[name] = tensor
    return converted


def load_exactly(model: Model, tensors: Mapping[str, torch.Tensor]) -> Model:
    """Put the tensors into the model as they are, every one of them; returns it in evaluation mode.

    Raises:
        ConfigError: names what is missing, what is unexpected, and what has another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [
        _list("missing", sorted(expected.keys() - found.keys())),
        _list("unexpected", sorted(found.keys() - expected.keys())),
        _list(
            "of another shape",
            [
                f"{name} {found[name]} instead of {expected[name]}"
                for name in sorted(expected.keys() & found.keys())
                if expected[name] != found[name]
            ],
        ),
    ]
    if any(problems):
        text = "; ".join(filter(None, problems))
        raise ConfigError(f"the checkpoint does not fit this configuration: {text}. {describe(tensors)}")
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


def _list(what: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {what}: {', '.join(names[:MAX_NAMED])}{more}" if names else ""


def describe(tensors: Mapping[str, torch.Tensor]) -> str:
    """What converted tensors say about their network, in a sentence: a help when a configuration does not fit."""
    gate, trunk = (tensors.get(f"lq_proj.{name}.weight") for name in ("gate_modules.0.content_proj", "latent_proj.0"))
    if gate is None or trunk is None:
        return "Its tensors are not those of a PiD network."
    family = "v1.5" if "pit_lq_gate.log_alpha" in tensors else "v1"
    gates = "per token" if gate.shape[0] == 1 else "per token and dimension"
    return f"Its tensors look like {family}: gates {gates}, lq_hidden_dim={trunk.shape[0]}, {trunk.shape[1]} channels."


def read_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a `.safetensors` file or a torch pickle, on the CPU; never runs code from the file.

    Raises:
        ConfigError: if the file is neither, or a pickle is not a flat table of tensors.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path} is no PyTorch checkpoint: torch.save writes a zip archive, which this is not")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        raise ConfigError(f"{path} is no PyTorch checkpoint: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ConfigError(f"{path} is not a flat table of tensors")
    return content


def locate_checkpoint(path_or_repo: str | Path, checkpoint: Checkpoint) -> Path:
    """The official file: `path_or_repo` itself, or in a folder laid out like the repository, or downloaded.

    Raises:
        ConfigError: if a path leads nowhere, or a local folder has no such file; names where it was looked for.
    """
    path = Path(path_or_repo)
    inside = Path("checkpoints", checkpoint.folder, FILE_NAME)
    if path.is_file():
        return path
    if path.is_dir():
        places = [path / inside, path / checkpoint.folder / FILE_NAME, path / FILE_NAME]
        for place in places:
            if place.is_file():
                return place
        raise ConfigError(f"no checkpoint at {' or '.join(map(str, places))}")
    if path.is_absolute() or path.suffix in (".pth", ".safetensors") or str(path_or_repo).startswith("."):
        raise ConfigError(f"{str(path_or_repo)!r} is not there, and is no name of a hub repository")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(str(path_or_repo), inside.as_posix()))


def load_original(path_or_repo: str | Path, checkpoint: Checkpoint) -> PiDTransformer2DModel:
    """The network of an official checkpoint; see `find_checkpoint` for which there are.

    Raises:
        ConfigError: if the file is not there or its tensors are not exactly those of the network.
    """
    from .modeling import PiDTransformer2DModel

    return PiDTransformer2DModel.from_original(
        read_checkpoint(locate_checkpoint(path_or_repo, checkpoint)), **checkpoint.config
    )
