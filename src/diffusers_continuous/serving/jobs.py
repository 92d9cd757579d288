"""The requests of one server, from submission to the answer, each in an asyncio task of its own apart from its client.

Whatever takes more than a moment of CPU (making a request, previews, encoding pictures) happens in threads, so that the
event loop answers everybody meanwhile. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from anyio import CapacityLimiter, to_thread

from diffusers_continuous.devices import peak_reserved_bytes
from diffusers_continuous.errors import EngineStoppedError, RequestCancelledError
from diffusers_continuous.request import RequestOutput, RequestStatus

from . import sse
from .errors import ApiError, api_error
from .generation import Generation, make_generation, to_base64, with_urls
from .media import MediaStore
from .protocol import ErrorObject, ImageData, ImageGenerationRequest, ImagesResponse, RequestInfo
from .settings import ServingSettings

if TYPE_CHECKING:
    from diffusers_continuous import ContinuousBatchingPipeline
    from diffusers_continuous.streams import RequestStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Requests that have ended are remembered, oldest forgotten first; the pictures of detached ones for a shorter time.
MAX_ENDED_JOBS = 1024
MAX_KEPT_RESULTS = 32
MAX_KEPT_CHARACTERS = 256 * 2**20  # of base64
# How often a server that stops looks whether all is done.
DRAIN_EVERY_S = 0.05
# Threads that make requests, and that make pictures of what comes back: few, since the engine needs the cores.
NUM_SUBMITTERS = 4
NUM_ENCODERS = 4


class Job:
    """One request on its way.

    Attributes:
        events: What a streaming client is sent; None is the end.
        ended: Set at the end. `response` or `error` is there then, unless nobody will ask for it.
    """

    def __init__(self, request_id: str, generation: Generation) -> None:
        self.request_id = request_id
        self.generation = generation
        self.created = int(time.time())
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.status = RequestStatus.WAITING
        self.step = self.num_steps = 0
        self.response: ImagesResponse | None = None
        self.error: ApiError | None = None
        self.stream: RequestStream | None = None
        self.is_cancelled = False
        self.has_client = True
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[RequestOutput, int]] = asyncio.Queue()
        self._due: deque[int] = deque()
        self._due_lock = threading.Lock()
        self.num_partials_left = 0

    @property
    def is_detached(self) -> bool:
        """True when it goes on without its client."""
        return bool(self.generation.request.detach)

    def follow(self, stream: RequestStream) -> None:
        """Listen to the request's outputs; of the intermediate ones only to those that a preview is made of."""
        self.stream = stream
        self.num_steps = stream.num_steps
        request = self.generation.request
        self.num_partials_left = (request.partial_images or 0) if request.stream else 0
        self._due.extend(partial_steps(self.num_partials_left, stream.num_steps))
        stream.listen(self._on_output, final_only=not self._due)

    def _on_output(self, output: RequestOutput) -> None:
        """Called by the engine's thread."""
        num_due = 0
        with self._due_lock:  # the thread that submits may call this too, with what is there already
            while not output.finished and self._due and self._due[0] <= output.step:
                self._due.popleft()
                num_due += 1
        if output.finished or num_due:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._outputs.put_nowait, (output, num_due))

    async def next_output(self) -> tuple[RequestOutput, int]:
        """An output, and how many previews are to be made of it."""
        return await self._outputs.get()

    def publish(self, event: bytes | None) -> None:
        """Send it to the client, if that one is there and streams."""
        if self.has_client and self.generation.request.stream:
            self.events.put_nowait(event)

    def lose_client(self) -> None:
        """Keep nothing for it any more."""
        self.has_client = False
        self.events = asyncio.Queue()

    def end(self, status: RequestStatus, response: ImagesResponse | None, error: ApiError | None) -> None:
        """Everything that is to be sent is there."""
        if self.stream is not None:
            self.step = self.stream.step
        self.stream = None  # with its tensors
        self.status, self.response, self.error = status, response, error
        self.publish(None)
        self.ended.set()


def partial_steps(num_partials: int, num_steps: int) -> list[int]:
    """After which steps previews are made: spread evenly, the first and the last step left out where there are enough.

    With fewer steps than previews some steps are shown twice.
    """
    return [max(1, round((index + 1) * num_steps / (num_partials + 1))) for index in range(num_partials)]


class JobBoard:
    """All requests of a server that runs one pipeline. Lives on one event loop.

    Args:
        pipe: Has no engine yet; gets one, which `stop` ends.
    """

    def __init__(self, pipe: ContinuousBatchingPipeline, settings: ServingSettings) -> None:
        self.settings = settings
        self.engine = pipe.init_continuous_batching(settings.engine_config)
        self.is_draining = False
        self.media = None if settings.media_dir is None else MediaStore(settings.media_dir)
        self._pipe = pipe
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._kept: deque[Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting = CapacityLimiter(NUM_SUBMITTERS)
        self._encoding = CapacityLimiter(NUM_ENCODERS)
        self.engine.start()

    # ------------------------------------------------------------------ life

    def check_health(self) -> None:
        """Raise what a health check answers.

        Raises:
            ApiError: 503, with the cause, when no request would be served.
        """
        if self.engine.fatal_error is not None:
            raise ApiError(503, f"the engine died: {self.engine.fatal_error!r}", "engine_stopped")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        if not self.engine.is_running():
            raise ApiError(503, "the engine is stopped", "engine_stopped")

    async def drain(self, is_forced: Callable[[], bool] = lambda: False) -> None:
        """Take no more requests; give those that were accepted `drain_s`, then fail them.

        Args:
            is_forced: Asked again and again; once it says yes, nothing is waited for any more.
        """
        self.is_draining = True
        end = time.monotonic() + self.settings.drain_s
        while self._num_open() and time.monotonic() < end and not is_forced():
            await asyncio.sleep(DRAIN_EVERY_S)
        if self._num_open():
            logger.warning("%d requests have not finished and fail", self._num_open())
            await to_thread.run_sync(lambda: self.engine.stop(block=False, hard_stop=True))
        while self._num_open() and not is_forced():
            await asyncio.sleep(DRAIN_EVERY_S)

    def _num_open(self) -> int:
        """Requests that have not ended, whether or not the engine has them already."""
        return sum(not job.ended.is_set() for job in self._jobs.values())

    async def stop(self) -> None:
        """End the engine, and with it whatever is left."""
        self.is_draining = True
        await to_thread.run_sync(lambda: self.engine.stop(hard_stop=True))
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ------------------------------------------------------------------ requests

    async def submit(self, request: ImageGenerationRequest, request_id: str | None = None) -> Job:
        """Hand a request to the engine; its task goes on by itself.

        Raises:
            ApiError: as the answer to it.
        """
        self.check_health()
        generation = make_generation(self._pipe, self.settings, request)
        request_id = request_id or f"req-{uuid4().hex}"
        if request_id in self._jobs and not self._jobs[request_id].ended.is_set():
            raise ApiError(400, f"X-Request-Id {request_id!r} is in use", "request_id_in_use", "x-request-id")
        job = Job(request_id, generation)
        self._remember(job)
        try:
            await to_thread.run_sync(self._start, job, limiter=self._submitting)
        except BaseException as error:
            answer = api_error(error, type(request).model_fields)
            job.end(RequestStatus.FAILED, None, answer)
            del self._jobs[request_id]
            if not isinstance(error, Exception):
                raise
            raise answer from error
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if job.is_cancelled:
            await self.cancel(job)
        return job

    def _start(self, job: Job) -> None:
        if self.engine.is_stopped and self.engine.fatal_error is None:
            raise EngineStoppedError("the server is shutting down")  # else the pipeline would make a new engine
        job.follow(self._pipe.stream(request_id=job.request_id, **job.generation.arguments))

    def _remember(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        self._jobs.move_to_end(job.request_id)
        if len(self._jobs) > MAX_ENDED_JOBS:
            oldest = next((name for name, other in self._jobs.items() if other.ended.is_set()), None)
            if oldest is not None:
                del self._jobs[oldest]

    def find(self, request_id: str) -> Job:
        """The request of that id.

        Raises:
            ApiError: 404.
        """
        job = self._jobs.get(request_id)
        if job is None:
            raise ApiError(404, f"request {request_id!r:.100} is not known", "request_not_found", "request_id")
        return job

    async def cancel(self, job: Job) -> bool:
        """Cancel before its next step; False when it has ended already."""
        if job.ended.is_set():
            return False
        job.is_cancelled = True  # also where it is not submitted yet
        if job.stream is not None:
            await to_thread.run_sync(job.stream.close)
        return True

    async def leave(self, job: Job) -> None:
        """The client is gone: cancel, unless the request was to go on."""
        job.lose_client()
        if not job.is_detached:
            await self.cancel(job)
            job.response = None

    def take_response(self, job: Job) -> ImagesResponse:
        """What the request ended with; only that of a detached one is kept for later.

        Raises:
            ApiError: when it has no pictures.
        """
        if job.error is not None:
            raise job.error
        response = job.response
        if response is None:
            raise ApiError(499, f"request {job.request_id!r} has no client any more", "request_cancelled")
        if not job.is_detached:
            job.response = None
        return response

    async def describe(self, job: Job, url_of: Callable[[str], str]) -> RequestInfo:
        """Where the request stands."""
        stream = job.stream
        info = RequestInfo(
            id=job.request_id, created=job.created, status=job.status, step=job.step, num_steps=job.num_steps
        )
        if job.ended.is_set():
            info.error = None if job.error is None else ErrorObject(**job.error.body["error"])
            info.result = None if job.response is None else with_urls(job.response, url_of)
        elif stream is not None:
            engine, name = self.engine, job.request_id
            info.queue_position = await to_thread.run_sync(engine.position, name)
            info.eta_s = await to_thread.run_sync(engine.eta_s, name)
            info.step = stream.step
            # Its pictures are still to be encoded when the engine is done with it.
            info.status = RequestStatus.RUNNING if stream.status.is_ending else stream.status
        return info

    # ------------------------------------------------------------------ one request's task

    async def _run(self, job: Job) -> None:
        try:
            output, num_due = await job.next_output()
            while not output.finished:
                if job.has_client:
                    await self._send_previews(job, output, num_due)
                output, num_due = await job.next_output()
            if output.error is not None:
                raise output.error
            response = await self._encode(self._finish, job.generation, output)
            if job.is_cancelled:  # while its pictures were encoded
                raise RequestCancelledError(f"request {job.request_id!r} was cancelled")
            if job.generation.request.stream and job.has_client:
                await self._send_final(job, output, response)
        except Exception as error:
            self._fail(job, error)
        else:
            is_wanted = job.is_detached or (job.has_client and not job.generation.request.stream)
            job.end(RequestStatus.FINISHED, response if is_wanted else None, None)
            if job.is_detached:
                self._keep(job)

    def _fail(self, job: Job, error: Exception) -> None:
        answer = api_error(error)
        if answer.status_code == 500:
            logger.error("request %s failed", job.request_id, exc_info=error)
        job.publish(sse.event("error", answer.body))
        status = RequestStatus.CANCELLED if isinstance(error, RequestCancelledError) else RequestStatus.FAILED
        job.end(status, None, answer)

    def _keep(self, job: Job) -> None:
        """Keep the pictures of this detached request, and of the latest others."""
        self._kept.append(job)
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT_RESULTS or self._num_kept() > MAX_KEPT_CHARACTERS):
            self._kept.popleft().response = None

    def _num_kept(self) -> int:
        """Characters of the pictures that are kept."""
        responses = [job.response for job in self._kept if job.response is not None]
        return sum(len(picture.b64_json or "") for response in responses for picture in response.data)

    async def _encode(self, work: Callable[..., T], *arguments: Any) -> T:
        return await to_thread.run_sync(work, *arguments, limiter=self._encoding)

    def _finish(self, generation: Generation, output: RequestOutput) -> ImagesResponse:
        """Encode the pictures; those that become URLs are named by their file. In a thread."""
        files = [generation.encode(picture) for picture in output.images]
        if generation.request.response_format == "url":
            assert self.media is not None
            names = [self.media.save(file, generation.output_format) for file in files]
            data = [ImageData(url=name, seed=generation.seed + index) for index, name in enumerate(names)]
        else:
            data = [ImageData(b64_json=to_base64(f), seed=generation.seed + index) for index, f in enumerate(files)]
        return generation.response(output, data, peak_reserved_bytes(self._pipe._execution_device))

    async def _send_previews(self, job: Job, output: RequestOutput, num_due: int) -> None:
        previews = await self._encode(lambda: output.preview)
        if previews:
            event = await self._encode(job.generation.encode_preview, previews[0])
            self._send_partials(job, event, num_due)

    def _send_partials(self, job: Job, b64_json: str, count: int) -> None:
        num_partials = job.generation.request.partial_images or 0
        for _ in range(min(count, job.num_partials_left)):
            payload = {"b64_json": b64_json, "partial_image_index": num_partials - job.num_partials_left}
            job.num_partials_left -= 1
            fields = job.generation.event_fields()
            job.publish(sse.event("image_generation.partial_image", {**payload, **fields}))

    async def _send_final(self, job: Job, output: RequestOutput, response: ImagesResponse) -> None:
        if job.num_partials_left:  # it was done sooner than they could be made
            b64_json = await self._encode(job.generation.encode_preview, output.images[0])
            self._send_partials(job, b64_json, job.num_partials_left)
        picture = response.data[0]
        rest = response.model_dump(include={"usage", "metrics", "warnings"}, exclude_none=True)
        payload = {"b64_json": picture.b64_json, "seed": picture.seed, **job.generation.event_fields(), **rest}
        job.publish(await self._encode(sse.event, "image_generation.completed", payload))
