"""Runs an application with uvicorn, and stops it in order: newcomers are refused while those inside finish."""

from __future__ import annotations

import logging
import socket

import uvicorn
from fastapi import FastAPI

logger = logging.getLogger("uvicorn.error")

# What answers that are ready get for being sent, once all requests have ended.
SENDING_S = 5
# Connections that may wait to be taken: uvicorn's number.
BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn's server. Told to stop, it drains the application's requests before it closes its socket.

    Meanwhile newcomers and health checks get 503. A second Ctrl-C ends at once. What the application raises where it
    starts, `run` raises; uvicorn would write down its traceback and exit.
    """

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, timeout_graceful_shutdown=SENDING_S, server_header=False, ws="none", lifespan="off"
        )
        super().__init__(config)
        self._app = app
        self._lifespan = app.router.lifespan_context(app)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then as uvicorn does, and say where, which it leaves to whoever bound the sockets."""
        await self._lifespan.__aenter__()
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            where = f"[{host}]" if ":" in host else host
            logger.info("running on http://%s:%d (Ctrl-C stops it)", where, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, stop as uvicorn does, then end the application."""
        await self._app.state.board.drain(lambda: self.force_exit)
        await super().shutdown(sockets)
        await self._lifespan.__aexit__(None, None, None)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; they are answered once a server runs on it.

    Raises:
        OSError: when the address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
