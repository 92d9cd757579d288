"""Which official PiD checkpoints exist, and the configuration of each. Data; nothing is read here.

The tensors alone do not say everything: the reference size of the rotary tables, the padding of the convolutions and
the scale are only in this table, and the Qwen-Image and FLUX networks of v1.5 have the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError

HUB_REPO = "nvidia/PiD"
FILE_NAME = "model_ema_bf16.pth"

CheckpointType = Literal["distilled", "undistilled"]

# How each backbone's latents look to the decoder: channels, pixels per cell, channels packed 2 x 2.
LATENTS: dict[str, dict[str, int]] = {
    "qwenimage": {"lq_latent_channels": 16, "latent_spatial_down_factor": 8},
    "flux": {"lq_latent_channels": 16, "latent_spatial_down_factor": 8},
    "flux2": {"lq_latent_channels": 128, "latent_spatial_down_factor": 16},
    "sd3": {"lq_latent_channels": 16, "latent_spatial_down_factor": 8},
    "sdxl": {"lq_latent_channels": 4, "latent_spatial_down_factor": 8},
    "dinov2": {"lq_latent_channels": 768, "latent_spatial_down_factor": 16},
    "siglip": {"lq_latent_channels": 1152, "latent_spatial_down_factor": 16},
}
# Models whose latents are another backbone's.
SAME_LATENTS = {"qwenimage-2512": "qwenimage", "zimage": "flux", "zimage-turbo": "flux", "flux2-klein": "flux2"}

V1: dict[str, Any] = {
    "lq_hidden_dim": 512,
    "lq_conv_padding_mode": "zeros",
    "lq_gate_type": "sigma_aware_per_token_per_dim",
    "pit_lq_inject": False,
    "rope_ref_h": 1024,
    "rope_ref_w": 1024,
}
V1PT5: dict[str, Any] = {
    "lq_hidden_dim": 1024,
    "lq_conv_padding_mode": "replicate",
    "lq_gate_type": "sigma_aware_per_token",
    "pit_lq_inject": True,
    "rope_ref_h": 2048,
    "rope_ref_w": 2048,
}
# sqrt(height * width) of the sizes trained on: the smallest is 2304 x 1728.
TRAINED_SIDES = {"2k": (1995, 2048), "2kto4k": (1995, 4096), "2kto4k_v1pt5": (1995, 4096)}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One official file."""

    backbone: str
    variant: str
    checkpoint_type: CheckpointType
    sr_scale: int

    @property
    def folder(self) -> str:
        """The file's folder, under `checkpoints/` of the repository."""
        version, variant = ("v1pt5_", "2kto4k") if self.variant == "2kto4k_v1pt5" else ("", self.variant)
        ending = "distill_4step" if self.checkpoint_type == "distilled" else "undistilled"
        return f"PiD_{version}res{variant}_sr{self.sr_scale}x_official_{self.backbone}_{ending}"

    @property
    def config(self) -> dict[str, Any]:
        """What `PiDTransformer2DModel` is built with; the widths and depths are its defaults."""
        is_new = self.variant == "2kto4k_v1pt5"
        config = {**LATENTS[self.backbone], **(V1PT5 if is_new else V1), "sr_scale": self.sr_scale}
        config["lq_latent_unpatchify_factor"] = 2 if is_new and self.backbone == "flux2" else 1
        config["trained_sides"] = TRAINED_SIDES[self.variant]
        return config

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """What `PiDScheduler` is built with."""
        if self.checkpoint_type == "distilled":
            return {"algorithm_type": "sde"}
        return {"algorithm_type": "dpmsolver++", "t_list": None, "shift": 6.0, "shift_reference": 2048}

    def __str__(self) -> str:
        return (
            f"backbone={self.backbone!r}, variant={self.variant!r}, checkpoint_type={self.checkpoint_type!r}, "
            f"sr_scale={self.sr_scale}"
        )


CHECKPOINTS: tuple[Checkpoint, ...] = (
    *(
        Checkpoint(backbone, "2kto4k_v1pt5", kind, 4)
        for backbone in ("qwenimage", "flux", "flux2")
        for kind in ("distilled", "undistilled")
    ),
    *(Checkpoint(backbone, "2k", "distilled", 4) for backbone in ("flux", "flux2", "sd3", "dinov2")),
    Checkpoint("siglip", "2k", "distilled", 8),
    *(Checkpoint(backbone, "2kto4k", "distilled", 4) for backbone in ("sd3", "sdxl")),
)


def find_checkpoint(
    backbone: str,
    variant: str = "2kto4k_v1pt5",
    checkpoint_type: str = "distilled",
    sr_scale: int | None = None,
) -> Checkpoint:
    """The official file for a backbone, whose latents may be another's; any scale unless one is given.

    Raises:
        ConfigError: if there is none; lists those of the backbone, or the backbones.
    """
    name = SAME_LATENTS.get(backbone, backbone)
    of_backbone = [item for item in CHECKPOINTS if item.backbone == name]
    if not of_backbone:
        raise ConfigError(f"backbone={backbone!r} has no PiD checkpoint; choose from {[*LATENTS, *SAME_LATENTS]}")
    for item in of_backbone:
        if (item.variant, item.checkpoint_type) == (variant, checkpoint_type) and sr_scale in (None, item.sr_scale):
            return item
    asked = f"variant={variant!r}, checkpoint_type={checkpoint_type!r}, sr_scale={sr_scale or 'any'}"
    existing = "\n  ".join(map(str, of_backbone))
    raise ConfigError(f"there is no PiD checkpoint for backbone={backbone!r} with {asked}. There are:\n  {existing}")
