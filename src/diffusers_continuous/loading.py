"""Loads the pipeline that a command or a server runs, on the best device of this process."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffusers import QwenImagePipeline

    from diffusers_continuous import ContinuousBatchingPipeline
    from diffusers_continuous.pid import PiDDecoder

EMBEDDED_MODEL = "the embedded model"


def load_pipeline(model: str | None, decoder: str | None = None) -> ContinuousBatchingPipeline:
    """The pipeline of a folder or hub repository, or of the embedded model, without bars of its own.

    It is in bfloat16 on an accelerator and in float32 on a CPU. With `decoder`, it has that PiDDecoder in place of its
    own.

    Raises:
        OSError: names what cannot be loaded, and why.
        ValueError: the decoder is none for this model.
    """
    for folder in (model, decoder):
        _check_folder(folder)
    from diffusers_continuous import ContinuousBatchingPipeline, embedded_model_path

    source = str(embedded_model_path()) if model is None else model
    pipe = cast("ContinuousBatchingPipeline", _load(ContinuousBatchingPipeline, source))
    if decoder is not None:
        pipe.decoder = load_decoder(decoder)
    return pipe


def load_decoder(decoder: str | None) -> PiDDecoder:
    """The PiDDecoder of a folder or hub repository, or the embedded one.

    Raises:
        OSError: names what cannot be loaded, and why.
    """
    _check_folder(decoder)
    from diffusers_continuous import embedded_decoder_path
    from diffusers_continuous.pid import PiDDecoder

    return cast("PiDDecoder", _load(PiDDecoder, str(embedded_decoder_path()) if decoder is None else decoder))


def load_stock_pipeline(model: str | None) -> QwenImagePipeline:
    """Diffusers' own pipeline of the same model, with its own copy of the weights.

    It is built from parts that were loaded through our class: of a folder that says its `default_sample_size`, the
    stock class would warn that it does not know it.

    Raises:
        OSError: names what cannot be loaded, and why.
    """
    from diffusers import QwenImagePipeline

    parts = {name: part for name, part in load_pipeline(model).components.items() if name != "decoder"}
    stock = QwenImagePipeline(**parts)
    stock.set_progress_bar_config(disable=True)
    return stock


def _check_folder(source: str | None) -> None:
    """Refuse a path that leads to no folder, which diffusers would take for the name of a hub repository."""
    if source is None or Path(source).is_dir():
        return
    if Path(source).exists():
        raise NotADirectoryError(
            f"{source!r} cannot be loaded: it is a file; name the folder that has model_index.json"
        )
    if source.startswith((".", "~")) or Path(source).is_absolute() or len(Path(source).parts) > 2:
        raise FileNotFoundError(f"{source!r} cannot be loaded: there is no such folder")


def _load(pipeline_class: Any, source: str) -> Any:
    from diffusers_continuous.devices import best_device, default_dtype

    device = best_device()
    try:
        with _no_loading_bars():
            pipe = pipeline_class.from_pretrained(source, dtype=default_dtype(device)).to(device)
    except (OSError, ValueError) as error:
        raise OSError(f"{source!r} cannot be loaded: {error}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def _no_loading_bars() -> Iterator[None]:
    """Diffusers and transformers draw a bar per component; a command has one bar for all it does."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = [library for library in (diffusers_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
