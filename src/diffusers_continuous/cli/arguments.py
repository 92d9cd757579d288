"""A parser that says what it knows, and the readers of single values, shared by options and prompt files.

A reader takes a string or a JSON value, gives the value back in its own type and raises `ValueError` with a message
that names the value and what was expected.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from ..config import ContinuousBatchingConfig
from ..sizes import diffusion_size as diffusion_size
from ..sizes import read_size as read_size

T = TypeVar("T")

MAX_SEED = 2**63 - 1


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser without abbreviations whose error for an unknown option names the known ones."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """The namespace of `argv`; options and positionals may come in any order. Exits on anything unknown."""
        known, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            option = next((word for word in unknown if word.startswith("-")), unknown[0]).split("=")[0]
            options = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(f"option {option!r} is not known{suggest(option, options)}")
        return known

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and the message alone; argparse would print the usage before it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_engine_option(parser: ArgumentParser) -> None:
    """`--engine`, which takes any field of the engine's config: `options.engine` is for `config.read_config`."""
    names = ", ".join(field.name for field in fields(ContinuousBatchingConfig))
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of ContinuousBatchingConfig, as in --engine compile=true --engine slo_scale=2; may be given "
        f"several times; NAME is one of {names}",
    )


def suggest(word: str, known: Iterable[str]) -> str:
    """What to add to "X is not known": the nearest known word, if one is near, and all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" choose from {', '.join(known)}"


def option_type(read: Callable[[Any], T]) -> Callable[[str], T]:
    """`read` as an argparse `type`, with its own message in the error."""

    def convert(text: str) -> T:
        """Raises ArgumentTypeError, the only error whose text argparse shows."""
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def read_text(value: object) -> str:
    """`value` itself; a ValueError if it is no string, which a line of a .jsonl file may hold."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def choice_reader(name: str, known: Iterable[str]) -> Callable[[object], str]:
    """A reader of one of the `known` words."""
    known = list(known)

    def read(value: object) -> str:
        """Raises ValueError that lists the known words."""
        if value not in known:
            raise ValueError(f"{name} {value!r} is not known{suggest(str(value), known)}")
        return str(value)

    return read


def integer_reader(name: str, least: int, most: int | None = None) -> Callable[[object], int]:
    """A reader of whole numbers in `least..most`."""
    limits = f"at least {least}" if most is None else f"{least} to {most}"

    def read(value: object) -> int:
        """Takes digits or an int; raises ValueError with the limits."""
        number = _whole_number(value)
        if number is None or number < least or (most is not None and number > most):
            raise ValueError(f"{name} {value!r} is not a whole number of {limits}")
        return number

    return read


def _whole_number(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*[+-]?\d+\s*", value) else None
    return value if type(value) is int else None  # a JSON true is no number


def read_cfg(value: object) -> float:
    """A guidance scale, a finite number of at least 0."""
    try:
        scale = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"cfg {value!r} is not a number of at least 0 (1 or less draws without guidance)")
    return scale


read_steps = integer_reader("steps", 1, 1000)
read_decoder = choice_reader("decoder", ("vae", "pid"))
read_early_stop = integer_reader("early_stop", 0, 999)
read_num_images = integer_reader("num_images", 1, 1000)
read_seed = integer_reader("seed", 0, MAX_SEED)
read_max_batch = integer_reader("max-batch", 1)
