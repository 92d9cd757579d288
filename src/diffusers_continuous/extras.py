"""Packages that are imported only when used. Knows which of our extras installs them, not what they are for."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, package: str, extra: str) -> Any:
    """Import `module`, which `pip install diffusers-continuous[extra]` brings with `package`.

    Raises:
        ImportError: names the extra, and why the import failed where the package is there but broken.
    """
    install = f"pip install 'diffusers-continuous[{extra}]'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise ImportError(f"{package} lacks {error.name}: {install}") from error
        raise ImportError(f"{package} is not installed: {install}") from error
    except (ImportError, OSError, RuntimeError) as error:  # one built for another torch fails in any of these ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ImportError(f"{package} cannot be imported ({reason}); install it anew: {install}") from error
