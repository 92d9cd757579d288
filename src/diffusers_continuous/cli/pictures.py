"""The folder that pictures are written to: numbered names, what made them inside the PNG, never half a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, PngImagePlugin, UnidentifiedImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

REQUEST_KEY = "request"  # the PNG text that says which request a picture answers
INDEX_KEY = "image_index"


class PictureFolder:
    """Gives each request a stem such as `0003-a-red-star` and writes its pictures under it."""

    def __init__(self, path: Path) -> None:
        make_folder(path)
        self.path = path
        self._next_number = 1 + max((number for file in path.iterdir() if (number := _number(file.name))), default=0)

    def next_stem(self, prompt: str) -> str:
        """A stem that no picture in the folder has."""
        stem = f"{self._next_number:04d}-{_slug(prompt)}"
        self._next_number += 1
        return stem

    def paths(self, stem: str, num_images: int) -> list[Path]:
        """Where the pictures of one request go."""
        names = [stem] if num_images == 1 else [f"{stem}-{index}" for index in range(1, num_images + 1)]
        return [self.path / f"{name}.png" for name in names]

    def pictures_by_request(self) -> dict[str, dict[int, Path]]:
        """For each request that left pictures here, the path of each by its index."""
        found: dict[str, dict[int, Path]] = {}
        for path in sorted(self.path.glob("*.png")):
            text = read_metadata(path)
            if REQUEST_KEY in text and text.get(INDEX_KEY, "").isdecimal():
                found.setdefault(text[REQUEST_KEY], {})[int(text[INDEX_KEY])] = path
        return found


def make_folder(path: Path) -> None:
    """Make the folder where there is none.

    Raises:
        OSError: names what is in the way.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{str(path)!r} is a file, and a folder is wanted")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"folder {str(path)!r} cannot be made: {error.strerror}") from error


def save_picture(picture: Picture, path: Path, metadata: Mapping[str, str]) -> None:
    """Writes `path` in one move: whoever looks finds the whole file or none."""
    text = PngImagePlugin.PngInfo()
    for key, value in metadata.items():
        text.add_itxt(key, value)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        picture.save(part, format="PNG", pnginfo=text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in a PNG; empty for a file that is none."""
    try:
        with Image.open(path) as picture:
            return {str(key): value for key, value in picture.info.items() if isinstance(value, str)}
    except (UnidentifiedImageError, OSError):
        return {}


def _number(name: str) -> int | None:
    match = re.match(r"(\d{4,})-.*\.png$", name)
    return int(match[1]) if match else None


def _slug(prompt: str) -> str:
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")
    return words[:40].rstrip("-") or "picture"
