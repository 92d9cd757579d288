"""`diffusers-continuous COMMAND ...`: finds the command and runs it.

A command's module is imported only when it runs, and none imports torch before it has read its options: help and
mistakes answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from .arguments import ArgumentParser, suggest

COMMANDS = {
    "generate": "draw prompts from the command line or a file",
    "serve": "OpenAI's images API over one engine",
    "bench": "how on time a running server is, at given rates of requests",
    "demo": "eight callers at once on the embedded model, with a timeline of their steps",
    "convert-pid": "an official PiD checkpoint to a folder that PiDDecoder loads",
    "env": "versions, device and attention backends",
}
MODULE_OF_COMMAND = {"convert-pid": "convert"}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command in `argv`: 0 done, 1 something failed, 2 a mistake in the call, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if not argv:
        parser.print_help()
        return 2
    command = argv[0]
    if command.startswith("-"):
        parser.parse_all(argv)  # --help and --version end here, anything else is an error
        return 2
    if command not in COMMANDS:
        parser.error(f"command {command!r} is not known{suggest(command, COMMANDS)}")
    try:
        return import_module(f".{MODULE_OF_COMMAND.get(command, command)}", __name__).main(argv[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> ArgumentParser:
    lines = "\n".join(f"  {name:<12} {what}" for name, what in COMMANDS.items())
    parser = ArgumentParser(
        prog="diffusers-continuous",
        usage="diffusers-continuous COMMAND [options]",
        description=f"Continuous batching for Qwen-Image inside Diffusers.\n\ncommands:\n{lines}",
        epilog="`diffusers-continuous COMMAND --help` tells a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('diffusers-continuous')}")
    return parser
