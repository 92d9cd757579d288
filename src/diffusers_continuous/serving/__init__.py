"""An HTTP server over one engine: OpenAI's images API, live requests, health and metrics.

Needs the extra `serving`. The command is `diffusers-continuous serve`; `create_app` gives the same application to any
other ASGI server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .settings import ServingSettings

if TYPE_CHECKING:
    from .app import create_app

__all__ = ["ServingSettings", "create_app"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .app import create_app  # when it is used: it needs torch, and Ray's gateway, which imports this, has none

    return create_app
