"""Pictures on disk that clients get as URLs. Names are made here, and only such a name is ever looked up."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from diffusers_continuous.errors import ConfigError

MEDIA_NAME = r"^[0-9a-f]{32}\.(png|jpeg|webp)$"


class MediaStore:
    """A folder of pictures under random names, which no one can guess.

    Raises:
        ConfigError: when there can be no such folder, or none that pictures can be written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "it is a file" if folder.exists() else error.strerror
            raise ConfigError(f"media_dir={str(folder)!r} cannot be a folder for pictures: {reason}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"media_dir={str(folder)!r} cannot be written to")
        self._folder = folder

    def save(self, content: bytes, output_format: str) -> str:
        """The name under which the picture can be had from now on. Whoever looks finds the whole file or none."""
        name = f"{secrets.token_hex(16)}.{output_format}"
        part = self._folder / f".{name}.part"
        try:
            part.write_bytes(content)
            os.replace(part, self._folder / name)
        finally:
            part.unlink(missing_ok=True)
        return name

    def load(self, name: str) -> bytes | None:
        """The picture of that name; None where there is none."""
        if not re.fullmatch(MEDIA_NAME, name):
            return None
        try:
            # No links, and no waiting for whoever writes to a pipe.
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
        except OSError:
            return None
