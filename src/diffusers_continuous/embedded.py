"""Where the models that ship with this package lie."""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"


def embedded_model_path() -> str:
    """Folder of the tiny Qwen-Image that ships with this package; any `from_pretrained` of a pipeline loads it."""
    return str(_ASSETS / "tiny-qwen-image")


def embedded_decoder_path() -> str:
    """Folder of the tiny PiD that ships with this package, for that model's latents; `PiDDecoder` loads it."""
    return str(_ASSETS / "tiny-pid")
