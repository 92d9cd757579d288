"""The HTTP application: routes, headers, documents. What they do is in `jobs`."""

# No `from __future__ import annotations` here: FastAPI must find the models that are made per application.
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from time import time
from typing import TYPE_CHECKING, Annotated, Any

from anyio import to_thread
from fastapi import FastAPI, Header, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from diffusers_continuous.prometheus import EngineExporter

from . import sse
from .errors import ApiError, api_error, invalid_request
from .generation import with_urls
from .jobs import Job, JobBoard
from .media import MEDIA_NAME
from .middleware import LimitBody, RequireApiKey
from .protocol import (
    REQUEST_ID,
    CancelledRequest,
    ErrorResponse,
    Health,
    ImagesResponse,
    Model,
    ModelList,
    RequestInfo,
    request_model,
)
from .settings import ServingSettings

if TYPE_CHECKING:
    from diffusers_continuous import ContinuousBatchingPipeline

OPEN_PATHS = ("/health", "/v1/health")
DESCRIPTION = "OpenAI's images API over one continuously batched diffusion pipeline."
# Of one server-sent event; what its data are is in OpenAI's documents.
EVENT_SCHEMA = {
    "type": "object",
    "properties": {
        "event": {"enum": ["image_generation.partial_image", "image_generation.completed", "error"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}
ERRORS = {
    400: "A field, or its value, is wrong.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing.",
    413: "The body is too long.",
    429: "The queue is full; `Retry-After` says for how long.",
    499: "The request was cancelled.",
    500: "The request failed while it ran.",
    503: "The engine has died, or the server is shutting down.",
}


def create_app(make_pipe: Callable[[], "ContinuousBatchingPipeline"], settings: ServingSettings) -> FastAPI:
    """An ASGI application that serves one pipeline.

    Args:
        make_pipe: Called once, when the application starts. The pipeline must have no running engine: the application
            makes one with `settings.engine_config` and stops it when it ends.

    Once started, `app.state.board` is its `JobBoard`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Loads in a thread, so that the asyncio loop stays free; at the end what has not finished fails."""
        board = app.state.board = JobBoard(await to_thread.run_sync(make_pipe), settings)
        app.state.exporter = EngineExporter(board.engine, settings.model_names[0], settings.metrics_prefix)
        try:
            yield
        finally:
            await board.stop()

    app = FastAPI(
        title="diffusers-continuous",
        description=DESCRIPTION,
        version=version("diffusers-continuous"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
    )
    _add_middleware(app, settings)
    _add_error_handlers(app, settings)
    _add_generation(app, settings)
    _add_requests(app, settings)
    _add_information(app, settings)
    if settings.media_dir is not None:
        _add_media(app)
    app.openapi = lambda: _document(app, settings)  # type: ignore[method-assign]
    return app


# ---------------------------------------------------------------------- the routes


def _add_generation(app: FastAPI, settings: ServingSettings) -> None:
    body_model = request_model(settings)

    @app.post(
        "/v1/images/generations",
        response_model=ImagesResponse,
        responses=_errors(400, 404, 413, 429, 499, 500, 503)
        | {200: {"content": {"text/event-stream": {"schema": EVENT_SCHEMA}}, "description": "Pictures, or events."}},
    )
    async def generate(
        request: Request,
        body: body_model,  # type: ignore[valid-type]
        x_request_id: Annotated[str | None, Header(pattern=REQUEST_ID)] = None,
    ) -> Response:
        """Draw pictures."""
        board: JobBoard = app.state.board
        job = await board.submit(body, x_request_id)
        headers = {"X-Request-Id": job.request_id}
        if job.generation.request.stream:
            return sse.EventStream(job.events, lambda: board.leave(job), headers)
        if not await _wait(job, request):
            await board.leave(job)
        try:
            response = with_urls(board.take_response(job), _url_of(request))
        except ApiError as error:
            error.headers = {**(error.headers or {}), **headers}
            raise
        return await _json(response, headers)


def _add_requests(app: FastAPI, settings: ServingSettings) -> None:
    @app.get("/v1/requests/{request_id}", response_model=RequestInfo, responses=_errors(404))
    async def describe(request: Request, request_id: str) -> Response:
        """Tell where a request stands; with the pictures of a detached one that has finished."""
        board: JobBoard = app.state.board
        return await _json(await board.describe(board.find(request_id), _url_of(request)))

    @app.delete("/v1/requests/{request_id}", response_model=CancelledRequest, responses=_errors(404))
    async def cancel(request_id: str) -> CancelledRequest:
        """Cancel a request before its next step; no effect on one that has ended."""
        board: JobBoard = app.state.board
        return CancelledRequest(id=request_id, cancelled=await board.cancel(board.find(request_id)))


def _add_information(app: FastAPI, settings: ServingSettings) -> None:
    created = int(time())
    models = {name: Model(id=name, created=created) for name in settings.model_names}

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """Name the served model."""
        return ModelList(data=list(models.values()))

    @app.get("/v1/models/{name:path}", responses=_errors(404))
    async def describe_model(name: str) -> Model:
        """Tell about the served model by one of its names."""
        if name not in models:
            raise ApiError(404, f"model {name!r:.200} is not served here", "model_not_found", "model")
        return models[name]

    @app.get("/v1/health", responses=_errors(503), operation_id="health_v1")
    @app.get("/health", responses=_errors(503), operation_id="health")
    async def health() -> Health:
        """Tell whether requests are served."""
        app.state.board.check_health()
        return Health()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Tell the engine's figures in Prometheus' text format."""
        content = await to_thread.run_sync(app.state.exporter.exposition)
        return Response(content, media_type=CONTENT_TYPE_LATEST)


def _add_media(app: FastAPI) -> None:
    pictures = {f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in ("png", "jpeg", "webp")}

    @app.get(
        "/media/{name}",
        response_class=Response,
        responses=_errors(400, 404) | {200: {"content": pictures, "description": "The picture."}},
    )
    async def picture(name: Annotated[str, Path(pattern=MEDIA_NAME)]) -> Response:
        """Give a picture that was answered as a URL."""
        board: JobBoard = app.state.board
        assert board.media is not None
        content = await to_thread.run_sync(board.media.load, name)
        if content is None:
            raise ApiError(404, f"picture {name!r} is not known", "media_not_found")
        kind = name.rpartition(".")[2]
        return Response(content, media_type=f"image/{kind}", headers={"X-Content-Type-Options": "nosniff"})


async def _wait(job: Job, request: Request) -> bool:
    """Until the request has ended; false when its client has left before."""
    waits = [asyncio.ensure_future(job.ended.wait()), asyncio.ensure_future(sse.disconnected(request.receive))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return job.ended.is_set()
    finally:
        for wait in waits:
            wait.cancel()


def _url_of(request: Request) -> Callable[[str], str]:
    return lambda name: f"{request.base_url}media/{name}"


async def _json(model: BaseModel, headers: dict[str, str] | None = None) -> Response:
    """The model as an answer. Written in a thread: pictures are megabytes."""
    content = await to_thread.run_sync(lambda: model.model_dump_json(exclude_none=True))
    return Response(content, media_type="application/json", headers=headers)


# ---------------------------------------------------------------------- around the routes


def _add_middleware(app: FastAPI, settings: ServingSettings) -> None:
    """What is added last sees a call first."""
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(RequireApiKey, api_key=settings.api_key, open_paths=OPEN_PATHS)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )


def _add_error_handlers(app: FastAPI, settings: ServingSettings) -> None:
    fields = list(request_model(settings).model_fields)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        """400, where FastAPI itself would answer 422."""
        return invalid_request(error.errors(), fields).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        """Its own status, also for what Starlette raises, such as 404 for an unknown path."""
        if not isinstance(error, ApiError):
            where = f"{request.method} {request.url.path!r:.200}"
            message = f"{error.detail}: {where}"
            error = ApiError(error.status_code, message, headers=error.headers)
        return error.response()

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        """500, or what `api_error` knows better; Starlette raises it again for the log."""
        return api_error(error).response()


def _errors(*status_codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": ErrorResponse, "description": ERRORS[code]} for code in status_codes}


def _document(app: FastAPI, settings: ServingSettings) -> dict[str, Any]:
    """The OpenAPI document. A wrong value is answered with 400 here, where FastAPI would have documented 422."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if settings.api_key is not None and path not in OPEN_PATHS:
                operation["responses"]["401"] = {"description": ERRORS[401], "content": error}
                operation["security"] = [{"apiKey": []}]
    schemas: dict[str, Any] = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    if settings.api_key is not None:
        document["components"]["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    app.openapi_schema = document
    return document
