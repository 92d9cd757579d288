"""What to draw: one `PromptRow` per request, out of the command line and a prompts file.

Knows the keys of a row and their readers; knows nothing of models or pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import (
    read_cfg,
    read_decoder,
    read_early_stop,
    read_num_images,
    read_seed,
    read_size,
    read_steps,
    read_text,
    suggest,
)

# Reads each key of a JSONL row; the command line gives the value of every key that a row leaves out.
ROW_KEYS: dict[str, Callable[[Any], Any]] = {
    "prompt": read_text,
    "negative_prompt": read_text,
    "size": read_size,
    "steps": read_steps,
    "cfg": read_cfg,
    "seed": read_seed,
    "num_images": read_num_images,
    "decoder": read_decoder,
    "early_stop": read_early_stop,
}
RUN_KEYS = ("model", "decoder_model", "output", "max_batch", "resume", "prompts_file")
FILE_TYPES = (".jsonl", ".txt")


@dataclass(frozen=True)
class PromptRow:
    """One request as the user wrote it; `where` says where, for messages."""

    prompt: str
    negative_prompt: str | None
    size: tuple[int, int] | None  # (width, height) of the picture; None is the model's own size
    steps: int
    cfg: float
    seed: int | None
    num_images: int
    decoder: str | None  # None is the model's own
    early_stop: int
    where: str

    def __post_init__(self) -> None:
        if self.early_stop >= self.steps:
            raise ValueError(f"{self.where}: early_stop {self.early_stop} leaves none of {self.steps} steps")
        if self.early_stop and self.decoder == "vae":
            raise ValueError(
                f"{self.where}: early_stop {self.early_stop} leaves noise that only decoder pid takes away"
            )

    @property
    def guidance_prompt(self) -> str | None:
        """The negative prompt that is drawn with: a single space when there is guidance and none was given."""
        if self.cfg <= 1:
            return None
        return " " if self.negative_prompt is None else self.negative_prompt

    def settings(self) -> dict[str, Any]:
        """All that decides the pictures, ready for JSON."""
        return {
            "prompt": self.prompt,
            "negative_prompt": self.guidance_prompt,
            "size": None if self.size is None else "{}x{}".format(*self.size),
            "steps": self.steps,
            "cfg": self.cfg,
            "seed": self.seed,
            "num_images": self.num_images,
            "decoder": self.decoder,
            "early_stop": self.early_stop,
        }


def rows_from_prompts(prompts: list[str], defaults: Mapping[str, Any]) -> list[PromptRow]:
    """One row per prompt of the command line."""
    return [PromptRow(**{**defaults, "prompt": prompt, "where": f"prompt {n}"}) for n, prompt in enumerate(prompts, 1)]


def rows_from_file(path: Path, defaults: Mapping[str, Any]) -> list[PromptRow]:
    """The rows of a .txt (a prompt a line) or .jsonl (an object a line) file, blank lines skipped.

    Raises `ValueError` with the line and the key for what cannot be read, and `OSError` for the file itself.
    """
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"prompts file {str(path)!r} is neither of {', '.join(FILE_TYPES)}")
    read = _read_json_line if path.suffix == ".jsonl" else _read_text_line
    lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines(): a prompt may hold U+2028
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path.name} line {number}"
            rows.append(PromptRow(**{**defaults, **read(line, where), "where": where}))
    if not rows:
        raise ValueError(f"prompts file {str(path)!r} holds no prompt")
    return rows


def _read_text_line(line: str, where: str) -> dict[str, Any]:
    return {"prompt": line.strip()}


def _read_json_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSON's own, and Python's for a number of more than 4,300 digits
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object such as {{'prompt': 'a cat', 'size': '128x192'}}")
    values = {key: _read_value(key, value, where) for key, value in row.items()}
    values = {key: value for key, value in values.items() if value is not None}
    if "prompt" not in values:
        raise ValueError(f"{where}: the key 'prompt' is missing")
    return values


def _read_value(key: str, value: object, where: str) -> Any:
    if key in RUN_KEYS:
        raise ValueError(f"{where}: key {key!r} holds for the whole run; give it on the command line")
    if key not in ROW_KEYS:
        raise ValueError(f"{where}: key {key!r} is not known{suggest(key, ROW_KEYS)}")
    if value is None:  # null is as good as leaving the key out
        return None
    try:
        return ROW_KEYS[key](value)
    except ValueError as error:
        raise ValueError(f"{where}: key {key!r}: {error}") from None
