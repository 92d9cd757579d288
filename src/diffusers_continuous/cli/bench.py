"""`diffusers-continuous bench`: how on time a running server is when callers do not wait for each other.

Talks to any server with OpenAI's `POST /v1/images/generations`. First some requests of every kind are sent alone, one
after another: that gives the usual time of each kind, and what the server can serve one request at a time. Then, at
each rate, requests are sent when their time has come, whether or not the server keeps up, each on a connection and in a
thread of its own. Latency counts from when a request was due; one that fails is late, however late it could have been.
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import os
import random
import statistics
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..serving.settings import API_KEY_VARIABLE
from .arguments import ArgumentParser, integer_reader, option_type, read_cfg, read_size
from .workload import (
    ARRIVALS,
    MIXES,
    SLO_SCALES,
    Kind,
    arrival_times,
    attainment,
    draw_kinds,
    kind_name,
    percentile,
    read_mix,
    rounded,
    slowdowns,
)

PROMPTS = tuple(
    f"a {color} {thing} on a {background} background"
    for color, thing, background in itertools.product(
        ("red", "green", "blue", "yellow"), ("star", "circle", "square", "heart"), ("white", "black", "grey")
    )
)
# Until the first request is due, so that it is not late already.
START_DELAY_S = 0.2


class ServerError(Exception):
    """The server cannot be measured: it is not there, or answers with something else."""


@dataclass(frozen=True)
class Answer:
    """What became of one request; `latency_s` is inf and `failure` a word for the reason when it failed."""

    latency_s: float
    failure: str | None = None


@dataclass(frozen=True)
class Server:
    """One server, and how to ask it for pictures."""

    url: str
    model: str | None
    api_key: str | None
    cfg: float
    timeout_s: float

    def generate(self, prompt: str, kind: Kind, seed: int, deadline_s: float | None = None) -> str | None:
        """Draw one picture; None when it came, else a word for why not."""
        side, steps = kind
        body = {
            "prompt": prompt,
            "size": f"{side}x{side}",
            "n": 1,
            "response_format": "b64_json",
            "num_inference_steps": steps,
            "true_cfg_scale": self.cfg,
            "negative_prompt": " ",
            "seed": seed,
        }
        if self.model is not None:
            body["model"] = self.model
        if deadline_s is not None:
            body["deadline_s"] = deadline_s
        try:
            answer = self._call("/v1/images/generations", json.dumps(body).encode())
            return None if answer["data"][0]["b64_json"] else "no picture"
        except urllib.error.HTTPError as error:
            with error:
                return f"HTTP {error.code}: {_message(error.read())}"
        except TimeoutError:
            return f"no answer in {self.timeout_s:g} s"
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {getattr(error, 'reason', error)}"

    def check(self) -> None:
        """Raise unless the server takes requests.

        Raises:
            ServerError: with the cause.
        """
        try:
            self._call("/health")
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"{self.url}/health says {error.code}: {_message(error.read())}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"no server answers at {self.url}: {getattr(error, 'reason', error)}") from None

    def _call(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            content = response.read()
        return json.loads(content) if body is not None else None


def _message(content: bytes) -> str:
    """The text of an error in OpenAI's shape, or the start of whatever it is."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return repr(content[:100].decode(errors="replace"))


# ---------------------------------------------------------------------- measuring


def measure_alone(server: Server, kinds: Sequence[Kind], repeats: int) -> dict[Kind, float]:
    """The median seconds of each kind alone; a first request of each, which may be slow, does not count.

    Raises:
        ServerError: when one fails.
    """
    usual = {}
    for kind in sorted(set(kinds)):
        taken = []
        for repeat in range(repeats + 1):
            start = time.monotonic()
            failure = server.generate(PROMPTS[repeat % len(PROMPTS)], kind, seed=repeat)
            if failure is not None:
                raise ServerError(f"a request of {kind[0]}x{kind[0]} and {kind[1]} steps failed: {failure}")
            taken.append(time.monotonic() - start)
        usual[kind] = statistics.median(taken[1:])
    return usual


def serve(
    server: Server, kinds: Sequence[Kind], due_s: Sequence[float], deadlines_s: Sequence[float | None]
) -> list[Answer]:
    """Send every request when it is due, and wait for all answers, in order of arrival."""
    answers = [Answer(math.inf, "not sent")] * len(kinds)
    start = time.monotonic() + START_DELAY_S

    def send(number: int) -> None:
        """Waits for the answer; its latency counts from when the request was due, however late it was sent."""
        failure = server.generate(PROMPTS[number % len(PROMPTS)], kinds[number], number, deadlines_s[number])
        latency_s = time.monotonic() - start - due_s[number] if failure is None else math.inf
        answers[number] = Answer(latency_s, failure)

    threads = []
    for number, at in enumerate(due_s):
        time.sleep(max(0.0, start + at - time.monotonic()))
        threads.append(threading.Thread(target=send, args=(number,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return answers


def summary(
    rate: float, kinds: Sequence[Kind], due_s: Sequence[float], answers: Sequence[Answer], usual_s: dict[Kind, float]
) -> dict[str, Any]:
    """What came of one rate: percentiles and attainment, of all requests and of each kind; who failed was late."""
    latencies = [answer.latency_s for answer in answers]
    finished = [latency for latency in latencies if math.isfinite(latency)]
    last_s = max((at + latency for at, latency in zip(due_s, latencies, strict=True) if latency < math.inf), default=0)
    found = slowdowns(kinds, latencies, usual_s)
    return {
        "rate_per_s": rate,
        "load": rate * statistics.fmean(usual_s[kind] for kind in kinds),
        "num_requests": len(kinds),
        "num_failed": len(kinds) - len(finished),
        "failures": dict(Counter(answer.failure for answer in answers if answer.failure is not None)),
        "served_per_s": len(finished) / last_s if last_s else 0.0,
        **{f"p{percent}_latency_s": percentile(latencies, percent) for percent in (50, 95, 99)},
        "kinds": {name: attainment(values) for name, values in found.items()},
    }


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """A row per rate and kind: share within each multiple of the usual time, and slowdowns."""
    columns = [f"within {scale:g}x" for scale in SLO_SCALES] + ["p50", "p95", "p99"]
    print("| requests/s | load | requests | failed | " + " | ".join(columns) + " |")
    print("| --- " * (4 + len(columns)) + "|")
    for result in results:
        for name, kind in result["kinds"].items():
            shares = [f"{kind[f'attainment_{scale:g}x']:.3f}" for scale in SLO_SCALES]
            times = [f"{kind[f'p{percent}_slowdown']:.1f}" for percent in (50, 95, 99)]
            where = [f"{result['rate_per_s']:.3g}", f"{result['load']:.2f}", name, str(result["num_failed"])]
            print("| " + " | ".join(where + shares + times) + " |")


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str]) -> int:
    """0 when every rate was measured, 1 when the server cannot be measured; failed requests are a result."""
    args = _parse(argv)
    server = Server(args.url.rstrip("/"), args.model, args.api_key, args.cfg, args.timeout)
    try:
        server.check()
        results, facts = _measure(server, args)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    print_table(results)
    settings = {name: getattr(args, name) for name in ("url", "mix", "shrink", "cfg", "arrivals", "seed", "deadline")}
    print(json.dumps(rounded({**settings, **facts, "results": results})))
    return 0


def _measure(server: Server, args: Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rng = random.Random(f"bench {args.seed}")
    kinds = draw_kinds(read_mix(args.mix), args.requests, rng, args.shrink)
    times = arrival_times(args.arrivals, args.requests, rng)
    usual = measure_alone(server, kinds, args.alone)
    serial_rate = 1 / statistics.fmean(usual[kind] for kind in kinds)
    alone_s = {kind_name(kind): seconds for kind, seconds in usual.items()}
    print(f"{server.url}: {serial_rate:.3g} requests/s one at a time; seconds alone {rounded(alone_s)}")
    results = []
    for rate in args.rate or [load * serial_rate for load in args.load]:
        stretch = (len(kinds) - 1) / (times[-1] * rate)
        due_s = [stretch * at for at in times]
        deadlines = [None if args.deadline is None else args.deadline * usual[kind] for kind in kinds]
        results.append(summary(rate, kinds, due_s, serve(server, kinds, due_s, deadlines), usual))
    return results, {"serial_requests_per_s": serial_rate, "alone_s": alone_s}


def _parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="diffusers-continuous bench",
        description="Sends a running server requests at given rates and tells how many were on time.",
        epilog="Prints a table and, as the last line, one JSON object.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", help="name to ask for (default: none, which is the server's own)")
    parser.add_argument(
        "--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"of the server (default: ${API_KEY_VARIABLE})"
    )
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument("--rate", type=_positive("rate"), nargs="+", help="requests per second")
    rates.add_argument(
        "--load",
        type=_positive("load"),
        nargs="+",
        default=[0.5, 0.8, 1.3],
        help="parts of what the server can serve one request at a time (default: 0.5 0.8 1.3)",
    )
    parser.add_argument(
        "--mix",
        type=_checked(read_mix),
        default="rfc",
        help=f"{', '.join(sorted(MIXES))}, or SHARE:SIDE:STEPS,... (default: %(default)s)",
    )
    parser.add_argument(
        "--shrink", type=option_type(integer_reader("shrink", 1)), default=1, help="divide every side by this"
    )
    parser.add_argument("--cfg", type=option_type(read_cfg), default=4.0, help="guidance (default: %(default)s)")
    parser.add_argument("--arrivals", choices=sorted(ARRIVALS), default="poisson", help="default: %(default)s")
    parser.add_argument(
        "--requests",
        type=option_type(integer_reader("requests", 2)),
        default=100,
        help="at each rate (default: %(default)s)",
    )
    parser.add_argument(
        "--alone",
        type=option_type(integer_reader("alone", 1)),
        default=3,
        help="requests of each kind alone (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline", type=_positive("deadline"), help="tell the server this multiple of the time alone as deadline_s"
    )
    parser.add_argument(
        "--timeout", type=_positive("timeout"), default=600.0, help="seconds for a request (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests and their times (default: %(default)s)")
    args = parser.parse_all(argv)
    scheme = urllib.parse.urlsplit(args.url).scheme
    if scheme not in ("http", "https"):
        parser.error(f"--url {args.url!r} does not begin with http:// or https://")
    try:
        for _, side, _ in read_mix(args.mix):
            read_size([side // args.shrink] * 2)
    except ValueError as error:
        parser.error(f"--mix {args.mix} with --shrink {args.shrink}: {error}")
    return args


def _checked(read: Callable[[str], object]) -> Callable[[str], str]:
    """A reader that leaves the text as it is, once it can be read."""

    def check(text: str) -> str:
        """Raises ValueError where `read` does."""
        read(text)
        return text

    return option_type(check)


def _positive(name: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        """Raises ValueError for what is no finite number above 0."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {text!r} is not a number above 0")
        return value

    return option_type(read)
