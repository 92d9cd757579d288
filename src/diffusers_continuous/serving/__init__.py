"""An HTTP server over one engine: OpenAI's images API, live requests, health and metrics.

Needs the extra `serving`. The command is `diffusers-continuous serve`; `create_app` gives the same application to any
other ASGI server.
"""

from __future__ import annotations

from .app import create_app
from .settings import ServingSettings

__all__ = ["ServingSettings", "create_app"]
