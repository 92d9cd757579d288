"""Two hundred mixed clients at once, every fifth of which leaves in the middle: the others' pictures are right."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from diffusers import QwenImagePipeline
from PIL import Image

from conftest import assert_pictures_equal, generator
from live_server import LiveServer, assert_nothing_is_left, picture_of, serve
from test_soak import live_tensor_bytes, open_files

NUM_CLIENTS = 200
LEAVES_EVERY = 5
# Width, height, steps, guidance, prompt; the seed is the place in the list.
KINDS = [
    (64, 64, 3, 1.0, "a red star on a blue background"),
    (96, 64, 2, 4.0, "a large white ring on a green background"),
    (64, 96, 4, 1.0, "a yellow heart"),
    (96, 96, 2, 1.0, "an orange triangle on a purple background"),
    (80, 80, 3, 3.0, "a black square"),
]


def body_of(number: int) -> dict[str, Any]:
    """What client `number` asks for; one that will leave asks for long work."""
    seed = (number // LEAVES_EVERY) % len(KINDS)
    width, height, steps, guidance, prompt = KINDS[seed]
    body = {"prompt": prompt, "size": f"{width}x{height}", "true_cfg_scale": guidance, "seed": seed}
    if number % LEAVES_EVERY == 0:
        return {
            **body,
            "num_inference_steps": 50,
            "stream": number % 2 == 0,
            "partial_images": 3 if number % 2 == 0 else 0,
        }
    return {**body, "num_inference_steps": steps, "stream": number % 2 == 0, "output_format": "png"}


def stock_picture(stock: QwenImagePipeline, seed: int) -> Image.Image:
    """What the stock pipeline draws for the clients of one kind."""
    width, height, steps, guidance, prompt = KINDS[seed]
    negative = " " if guidance > 1 else None
    return stock(
        prompt,
        negative_prompt=negative,
        true_cfg_scale=guidance,
        width=width,
        height=height,
        num_inference_steps=steps,
        generator=generator(seed),
    ).images[0]


@dataclass
class Crowd:
    """All clients, on one event loop of their own."""

    url: str
    latencies: list[float] = field(default_factory=list)
    pictures: dict[int, Image.Image] = field(default_factory=dict)

    async def run(self) -> None:
        self.someone_is_done = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as self.http:
            await asyncio.gather(*(self._be_client(number) for number in range(NUM_CLIENTS)))

    async def _be_client(self, number: int) -> None:
        body = body_of(number)
        start = time.monotonic()
        if number % LEAVES_EVERY == 0:
            await self._leave(body)
            return
        response = await self.http.post("/v1/images/generations", json=body)
        assert response.status_code == 200, response.text
        self.latencies.append(time.monotonic() - start)
        self.someone_is_done.set()
        if body["stream"]:
            (event,) = [line for line in response.text.splitlines() if line.startswith("data: ")]
            self.pictures[number] = picture_of(httpx.Response(200, text=event.removeprefix("data: ")).json())
        else:
            self.pictures[number] = picture_of(response.json()["data"][0])

    async def _leave(self, body: dict[str, Any]) -> None:
        """With the first preview, or as soon as somebody else has a picture."""
        call = asyncio.ensure_future(self._watch(body))
        done = asyncio.ensure_future(self.someone_is_done.wait())
        await asyncio.wait([call] if body["stream"] else [call, done], return_when=asyncio.FIRST_COMPLETED)
        for task in (call, done):
            task.cancel()
        await asyncio.gather(call, done, return_exceptions=True)

    async def _watch(self, body: dict[str, Any]) -> None:
        async with self.http.stream("POST", "/v1/images/generations", json=body) as response:
            async for line in response.aiter_lines():
                if line == "event: image_generation.partial_image":
                    return


def serve_crowd(server: LiveServer, stock: QwenImagePipeline) -> None:
    """Check what everybody got, and that nothing is left of anybody."""
    crowd = Crowd(server.url)
    start = time.monotonic()
    asyncio.run(crowd.run())
    wall_s = time.monotonic() - start
    while (stats := server.engine.stats()).num_running_requests + stats.num_waiting_requests:
        assert server.http.get("/health").status_code == 200  # the last ones that left are being noticed
    num_leavers = NUM_CLIENTS // LEAVES_EVERY
    expected = [stock_picture(stock, seed) for seed in range(len(KINDS))]
    assert len(crowd.pictures) == NUM_CLIENTS - num_leavers
    for number, picture in crowd.pictures.items():
        assert_pictures_equal(picture, expected[body_of(number)["seed"]])
    assert sum(stats.num_by_status.values()) == NUM_CLIENTS
    assert stats.num_by_status.get("failed", 0) == 0
    assert stats.num_by_status["cancelled"] > num_leavers / 2  # who is slow to leave may find its picture drawn
    assert stats.mean_rows_per_step > 3
    assert_nothing_is_left(server)
    jobs = server.board._jobs.values()
    assert len(jobs) == NUM_CLIENTS
    assert [job for job in jobs if job.response is not None or job.stream is not None or not job.events.empty()] == []
    p95 = statistics.quantiles(crowd.latencies, n=20)[-1]
    rate = len(crowd.latencies) / wall_s
    print(
        f"{NUM_CLIENTS} clients, {stats.num_by_status['cancelled']} cancelled: p95 {p95:.2f} s, {rate:.1f} pictures/s"
    )


def test_two_hundred_mixed_clients_some_of_which_leave(components, stock):
    with serve(components) as server:
        server.generate()  # what stays for good after the first request is no leak
    del server
    tensor_bytes, threads, files = live_tensor_bytes(), set(threading.enumerate()), open_files()
    with serve(components) as server:
        serve_crowd(server, stock)
    del server
    assert live_tensor_bytes() <= tensor_bytes * 1.01
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files
