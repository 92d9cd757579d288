"""`diffusers-continuous serve`: one pipeline behind OpenAI's images API."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import ContinuousBatchingConfig, read_config
from ..errors import ContinuousBatchingError
from ..loading import EMBEDDED_MODEL, load_pipeline
from ..serving.media import MediaStore
from ..serving.settings import (
    API_KEY_VARIABLE,
    MAX_QUEUE_SIZE,
    METRICS_PREFIXES,
    ServingSettings,
    is_loopback,
    names_of,
)
from . import arguments
from .arguments import ArgumentParser, choice_reader, integer_reader, option_type

DESCRIPTION = """\
Serves one pipeline to many clients at once: POST /v1/images/generations as OpenAI's clients send it, GET /v1/models,
/health and /metrics, GET and DELETE /v1/requests/{id}. Everybody's denoising steps run together."""

EPILOG = f"""\
The key may also stand in the environment variable {API_KEY_VARIABLE}, where other users of this machine do not see it.
Ctrl-C, or a SIGTERM, lets accepted requests finish for --drain-s seconds; a second Ctrl-C ends at once.
exit code: 1 the model cannot be loaded, or no engine made for it as --engine says; 2 a mistake in the call, such as a
port that is in use; 130 stopped by Ctrl-C. A SIGTERM ends it as usual."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; the exit code, which `--help` explains."""
    parser = _parser()
    options = parser.parse_all(argv)
    options.api_key = options.api_key or os.environ.get(API_KEY_VARIABLE) or None
    try:
        settings = _settings(options)
        if settings.media_dir is not None:
            MediaStore(settings.media_dir)  # which tells what is wrong with the folder
    except ValueError as error:
        parser.error(str(error))
    try:
        from diffusers_continuous.serving import create_app
        from diffusers_continuous.serving.server import Server, listen
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: pip install 'diffusers-continuous[serving]'")
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        parser.error(_why_not_there(options.host, options.port, error))
    with listener:
        print(f"loading {options.model or EMBEDDED_MODEL}", file=sys.stderr)
        try:
            pipe = load_pipeline(options.model, options.decoder_model)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        server = Server(create_app(lambda: pipe, settings))
        try:
            server.run([listener])
        except ContinuousBatchingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _why_not_there(host: str, port: int, error: OSError) -> str:
    """Why the server cannot listen at that address, and which option to change."""
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} is in use on {host}: stop what listens there, or name another port"
    reason = str(error.strerror or error).partition(" (while")[0]  # what follows repeats the address
    return f"--host {host} --port {port}: this machine cannot listen there: {reason}"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="diffusers-continuous serve", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("--model", metavar="PATH_OR_REPO", help="a Qwen-Image model (default: the embedded one)")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be given several times (default: --model, without the way to a folder)",
    )
    add(
        "--decoder-model",
        metavar="PATH_OR_REPO",
        help="a PiDDecoder; then pictures are 4 times larger than what is denoised unless a request asks for the vae",
    )
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="default: %(default)s, which only this machine reaches")
    add("--port", type=option_type(integer_reader("port", 0, 65535)), default=8000, metavar="N", help="default: 8000")
    add("--api-key", metavar="KEY", help="what clients must send as `Authorization: Bearer KEY`")
    add("--allow-unauthenticated", action="store_true", help="let other machines in without a key")
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin whose pages may call; may be given several times (default: none)",
    )
    positive = option_type(integer_reader("number", 1))
    add(
        "--max-size",
        type=positive,
        default=ServingSettings.max_size,
        metavar="N",
        help="longest side in pixels (default: %(default)s)",
    )
    add(
        "--max-steps",
        type=option_type(arguments.read_steps),
        default=ServingSettings.max_steps,
        metavar="N",
        help="most denoising steps of a request (default: %(default)s)",
    )
    add(
        "--max-n",
        type=positive,
        default=ServingSettings.max_n,
        metavar="N",
        help="most pictures of a request (default: %(default)s)",
    )
    add(
        "--max-queue",
        type=option_type(integer_reader("max-queue", 0)),
        metavar="N",
        help=f"most pictures that may wait for a place; later ones get 429; 0 for no limit (default: {MAX_QUEUE_SIZE})",
    )
    add(
        "--max-batch",
        type=option_type(arguments.read_max_batch),
        metavar="N",
        help=f"most pictures in one forward (default: {ContinuousBatchingConfig.max_requests_per_batch})",
    )
    arguments.add_engine_option(parser)
    add(
        "--max-body-bytes",
        type=positive,
        default=ServingSettings.max_body_bytes,
        metavar="N",
        help="longest request body (default: %(default)s)",
    )
    add("--media-dir", type=Path, metavar="DIR", help="keep pictures here and let clients have them as URLs")
    add(
        "--drain-s",
        type=option_type(integer_reader("drain-s", 0)),
        default=int(ServingSettings.drain_s),
        metavar="S",
        help="seconds that accepted requests get to finish when the server is stopped (default: %(default)s)",
    )
    add(
        "--metrics-prefix",
        type=option_type(choice_reader("metrics-prefix", METRICS_PREFIXES)),
        default=ServingSettings.metrics_prefix,
        metavar="NAME",
        help=f"what the names of the metrics start with: {' or '.join(METRICS_PREFIXES)} (default: %(default)s)",
    )
    return parser


def _settings(options: argparse.Namespace) -> ServingSettings:
    if not is_loopback(options.host) and options.api_key is None and not options.allow_unauthenticated:
        raise ValueError(
            f"--host {options.host} lets other machines in: set --api-key or {API_KEY_VARIABLE}, "
            "or say --allow-unauthenticated"
        )
    return ServingSettings(
        model_names=tuple(options.served_model_name or names_of(options.model)),
        engine_config=read_config(
            "--engine",
            options.engine,
            {
                "max_queue_size": ("--max-queue", options.max_queue),
                "max_requests_per_batch": ("--max-batch", options.max_batch),
            },
            max_queue_size=MAX_QUEUE_SIZE,
        ),
        max_size=options.max_size,
        max_steps=options.max_steps,
        max_n=options.max_n,
        max_body_bytes=options.max_body_bytes,
        api_key=options.api_key,
        cors_origins=tuple(options.cors_origin),
        media_dir=options.media_dir,
        metrics_prefix=options.metrics_prefix,
        drain_s=options.drain_s,
    )
