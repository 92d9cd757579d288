"""Runs an application with uvicorn, and stops it in order: newcomers are refused while those inside finish."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

# What answers that are ready get for being sent, once all requests have ended.
SENDING_S = 5


class Server(uvicorn.Server):
    """uvicorn's server. Told to stop, it drains the application's requests before it closes its socket.

    Meanwhile newcomers and health checks get 503. A second Ctrl-C ends at once.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        config = uvicorn.Config(
            app, host, port, timeout_graceful_shutdown=SENDING_S, server_header=False, ws="none", lifespan="on"
        )
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop as uvicorn does."""
        await self._app.state.board.drain(lambda: self.force_exit)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the application as it is, and its engine running
            await self.lifespan.shutdown()
