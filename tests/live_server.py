"""A real server on a real socket, in a thread of this process, so that tests can look at its engine."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
from PIL import Image

from diffusers_continuous import ContinuousBatchingConfig, ContinuousBatchingPipeline, DiffusionEngine
from diffusers_continuous.serving import ServingSettings, create_app
from diffusers_continuous.serving.jobs import JobBoard
from diffusers_continuous.serving.server import Server, listen

SETTINGS = ServingSettings(model_names=("tiny", "org/tiny"), max_size=256, max_steps=50, max_n=4, drain_s=30)
WAIT_S = 60


class LiveServer:
    """A started server. `client` is OpenAI's, without retries; `http` is for what that one never sends."""

    def __init__(self, make_pipe: Callable[[], ContinuousBatchingPipeline], settings: ServingSettings) -> None:
        self.app = create_app(make_pipe, settings)
        self.server = Server(self.app)
        self._socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        key = settings.api_key or "unused"
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)

    @property
    def board(self) -> JobBoard:
        return self.app.state.board

    @property
    def engine(self) -> DiffusionEngine:
        return self.board.engine

    def generate(self, prompt: str = "a red star", **fields: Any) -> Any:
        """OpenAI's call, with fields that it does not know in its `extra_body`."""
        known = ("model", "n", "size", "stream", "partial_images", "response_format", "output_format", "quality")
        body = {name: fields.pop(name) for name in known if name in fields}
        return self.client.images.generate(prompt=prompt, **{"size": "64x64", **body}, extra_body={**STEPS, **fields})

    def request(self, request_id: str) -> dict[str, Any]:
        """What the server tells of a request."""
        return self.http.get(f"/v1/requests/{request_id}").json()

    def wait_for(self, request_id: str, *statuses: str) -> dict[str, Any]:
        """Ask until the request has one of the statuses."""
        end = time.monotonic() + WAIT_S
        while (info := self.request(request_id)).get("status") not in statuses:
            assert time.monotonic() < end, info
        return info

    def wait_until_queued(self, request_id: str) -> None:
        """Until the engine has the request."""
        end = time.monotonic() + WAIT_S
        while "queue_position" not in self.request(request_id):
            assert time.monotonic() < end

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


STEPS = {"num_inference_steps": 3, "true_cfg_scale": 1.0}


@contextlib.contextmanager
def serve(components: dict[str, Any], decoder: Any = None, **settings: Any) -> Iterator[LiveServer]:
    """A server over a pipeline of shared components; other settings are fields of `ServingSettings` or of the engine's
    config."""
    own = {name: value for name, value in settings.items() if hasattr(SETTINGS, name)}
    config = {name: value for name, value in settings.items() if name not in own}
    own["engine_config"] = replace(ContinuousBatchingConfig(max_queue_size=256), **config)

    def make_pipe() -> ContinuousBatchingPipeline:
        pipe = ContinuousBatchingPipeline(**components, default_sample_size=16, decoder=decoder)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    server = LiveServer(make_pipe, replace(SETTINGS, **own))
    server.thread.start()
    try:
        while server.thread.is_alive():  # the socket takes calls before the application does
            if server.http.get("/health").status_code == 200:
                break
        yield server
    finally:
        server.stop()
        server.http.close()
        server.client.close()


def picture_of(item: Any) -> Image.Image:
    """The picture of an item of `data`, or of an event."""
    return Image.open(io.BytesIO(base64.b64decode(item["b64_json"] if isinstance(item, dict) else item.b64_json)))


def assert_nothing_is_left(server: LiveServer) -> None:
    """The engine is idle and its ledger adds up."""
    engine = server.engine
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_running_requests, stats.num_waiting_requests) == (0,) * 4
    assert engine._active == {}
    with engine.pause():  # what ended in the last step gives its pages back
        engine.scheduler.memory.check_integrity()
        assert stats.num_used_blocks == 0
