"""Two engines under Ray Serve: who gets a request, what a death takes along, and that nothing is left afterwards.

Ray runs in a process of its own, `ray_cluster.py`. The gateway is also tested alone, with replicas whose behaviour is
known.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError

from diffusers_continuous import ContinuousBatchingConfig
from diffusers_continuous.errors import ConfigError
from diffusers_continuous.serving import ServingSettings, ray_app
from diffusers_continuous.serving.ray_app import app, router_config
from diffusers_continuous.serving.ray_gateway import Gateway, is_idempotent, work_of
from diffusers_continuous.serving.ray_router import QueueCostRouter
from diffusers_continuous.serving.ray_routing import WAIT_METRIC, Backlogs, Call, PredictedWaitPolicy, Work
from diffusers_continuous.serving.settings import API_KEY_VARIABLE

PROGRAM = Path(__file__).with_name("ray_cluster.py")
WAIT_S = 300
SMALL = {"prompt": "a red star", "size": "64x64", "true_cfg_scale": 1.0}
SETTINGS = ServingSettings(model_names=("tiny",), max_size=256, max_steps=50)
LONG = {**SMALL, "size": "128x128", "num_inference_steps": 200}


# ---------------------------------------------------------------------- a real Ray


class Cluster:
    """Ray with two engines of the embedded model, in another process."""

    def __init__(self, folder: str) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            # Beside other work, what Ray starts would hardly run at the niceness that it gives it.
            "RAY_worker_niceness": "0",
            # A busy machine takes its time, and Ray would take what is slow for dead.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
        }
        self.folder = folder
        self.log = Path(folder, "driver.log")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.http = httpx.Client(timeout=WAIT_S)

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError(self.log.read_text()[-5000:])

    def connect(self) -> None:
        """Wait until it listens."""
        self.http.base_url = self._read()

    def tell(self, command: str) -> str:
        """Have the process do something, and hear its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        self.http.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            assert self._process.wait(WAIT_S) == 0
        finally:
            self._process.kill()
            self._process.stdout.close()

    @property
    def processes(self) -> list[str]:
        """Command lines of what runs for this cluster."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_text().replace("\0", " ")
                if self.folder in command and path.parent.name != str(os.getpid()):
                    found.append(command)
        return found

    def generate(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/images/generations", json={**SMALL, "num_inference_steps": 3, **fields})

    @contextlib.contextmanager
    def stream(self, **fields: Any) -> Iterator[tuple[str, Iterator[tuple[str, dict[str, Any]]]]]:
        """The replica that draws, and the events; the first of them has come."""
        body = {**LONG, "stream": True, "partial_images": 3, **fields}
        with self.http.stream("POST", "/v1/images/generations", json=body) as response:
            assert response.status_code == 200, response.read()
            yield response.headers["x-replica"], self._events(response)

    def _events(self, response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray-")  # a short name: Ray makes sockets in it
    cluster = Cluster(folder)
    try:
        cluster.connect()
        yield cluster
    finally:
        try:
            cluster.stop()
        finally:
            left = cluster.processes
            shutil.rmtree(folder, ignore_errors=True)
    assert left == []


class Caller(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work
        self.start()

    def run(self) -> None:
        self.answer = self._work()

    def result(self) -> Any:
        self.join(WAIT_S)
        return self.answer


def replica_of(cluster: Cluster, request_id: str) -> str:
    """Who has the request; asks until somebody has."""
    while True:
        answer = cluster.http.get(f"/v1/requests/{request_id}")
        if answer.status_code == 200:
            assert answer.json()["status"] in ("waiting", "running")
            return answer.headers["x-replica"]


def test_two_replicas_and_a_death(cluster):
    """One test, in order, since the cluster takes longest and a death is final."""
    assert cluster.http.get("/health").json() == {"status": "ok"}
    answer = cluster.generate(seed=7)
    assert answer.status_code == 200, answer.text
    picture = answer.json()["data"]
    assert answer.headers["x-request-id"]

    # Pictures lie in one folder, and metrics have the names that were asked for.
    (kept,) = cluster.generate(seed=7, response_format="url").json()["data"]
    assert base64.b64encode(cluster.http.get(kept["url"]).content).decode() == picture[0]["b64_json"]
    assert "vllm_omni:num_requests_running" in cluster.http.get("/metrics").text

    # Errors are the application's.
    refused = cluster.generate(size="100x64")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
    assert cluster.http.get("/v1/requests/nobody").json()["error"]["code"] == "request_not_found"

    # While one is busy for long, newcomers go to the other, which draws the same pictures.
    with cluster.stream() as (busy, _):
        answers = [cluster.generate(seed=7) for _ in range(3)]
        (other,) = {answer.headers["x-replica"] for answer in answers}
        assert other != busy
        assert all(answer.json()["data"] == picture for answer in answers)
        # Both are busy: the shorter queue gets it.
        with cluster.stream(num_inference_steps=150) as (second, events):
            assert second == other
            assert next(events)[0] == "image_generation.partial_image"

    # Whoever asks about a request finds it, and cancels it.
    cancelled = Caller(lambda: cluster.http.post("/v1/images/generations", json=LONG, headers={"x-request-id": "mine"}))
    replica_of(cluster, "mine")
    assert cluster.http.delete("/v1/requests/mine").json()["cancelled"]
    assert cancelled.result().json()["error"]["code"] == "request_cancelled"

    # One dies: what it was drawing is lost with an error that says so, unless it can be drawn again.
    with two_streams(cluster, 120, 240) as ((doomed, lost_events), (safe, safe_events)):
        later = {**SMALL, "num_inference_steps": 100, "priority": 50}  # fewer steps are left where it will die
        callers = {
            name: Caller(
                lambda body=body, name=name: cluster.http.post(
                    "/v1/images/generations", json=body, headers={"x-request-id": name}
                )
            )
            for name, body in (("unseeded", later), ("seeded", {**later, "seed": 7}))
        }
        assert {replica_of(cluster, name) for name in callers} == {doomed}
        assert cluster.tell(f"kill {doomed}") == "killed"
        kind, error = list(lost_events)[-1]
        assert (kind, error["error"]["code"]) == ("error", "replica_died")
        lost = callers["unseeded"].result()
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "replica_died")
        assert int(lost.headers["retry-after"]) >= 1
        drawn_again = callers["seeded"].result()
        assert (drawn_again.status_code, drawn_again.headers["x-replica"]) == (200, safe)
        assert list(safe_events)[-1][0] == "image_generation.completed"
    assert cluster.generate(seed=7).json()["data"] == picture


@contextlib.contextmanager
def two_streams(cluster: Cluster, *steps: int) -> Iterator[Any]:
    """One on each replica; tried again while what was cancelled before is still believed to be there."""
    while True:
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(cluster.stream(num_inference_steps=count)) for count in steps]
            if streams[0][0] != streams[1][0]:
                yield streams
                return


# ---------------------------------------------------------------------- the gateway alone


class FakeReplicas:
    """Ray's handle: `draw(call)` gives what `EngineReplica.call` of the chosen replica would."""

    def __init__(self, draw: Callable[[Any], AsyncIterator[Any]]) -> None:
        self._draw = draw
        self.calls: list[Any] = []
        self.num_closed = 0

    def options(self, **_: Any) -> FakeReplicas:
        return self

    def remote(self, call: Any) -> Any:
        self.calls.append(call)
        items = self._draw(call)
        replicas = self

        class Response:
            def __aiter__(self) -> AsyncIterator[Any]:
                return items

            def cancel(self) -> None:
                replicas.num_closed += 1

        return Response()


def answer_with(status: int, body: bytes, kind: bytes = b"application/json") -> list[dict[str, Any]]:
    return [
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]},
        {"type": "http.response.body", "body": body},
    ]


def ask(replicas: FakeReplicas, method: str, path: str, **request: Any) -> httpx.Response:
    """The gateway's answer to one call."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(Gateway(replicas, SETTINGS))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


def dying(num_deaths: int, *before: Any) -> FakeReplicas:
    """The first calls die after what is `before`, later ones are answered."""
    left = iter([True] * num_deaths)

    async def draw(_: Any) -> AsyncIterator[Any]:
        yield "a"
        if next(left, False):
            for item in before:
                yield item
            raise ActorDiedError
        for item in answer_with(200, b'{"data": []}'):
            yield item

    return FakeReplicas(draw)


def test_what_gives_the_same_again_is_tried_once_more():
    replicas = dying(1, answer_with(200, b"")[0])  # headers were not passed on yet
    answer = ask(replicas, "POST", "/v1/images/generations", json={**SMALL, "seed": 3})
    assert (answer.status_code, answer.json()) == (200, {"data": []})
    assert answer.headers["x-replica"] == "a"
    first, second = replicas.calls
    assert first.key != second.key
    assert first.headers == second.headers  # with one request id


@pytest.mark.parametrize(("num_deaths", "fields"), [(2, {"seed": 3}), (1, {})])
def test_else_a_death_is_told_as_something_to_retry(num_deaths, fields):
    answer = ask(dying(num_deaths), "POST", "/v1/images/generations", json={**SMALL, **fields})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"] == {
        "message": "the replica that had this request died, and nothing of it is left: send it again",
        "type": "server_error",
        "code": "replica_died",
        "param": None,
    }


def test_a_stream_that_has_begun_ends_with_an_error_event():
    start, body = answer_with(200, b"event: image_generation.partial_image\ndata: {}\n\n", b"text/event-stream")
    replicas = dying(1, start, {**body, "more_body": True})
    answer = ask(replicas, "POST", "/v1/images/generations", json={**SMALL, "seed": 3, "stream": True})
    events = answer.text.strip().split("\n\n")
    assert len(events) == 2
    assert events[1].startswith("event: error")
    assert '"code":"replica_died"' in events[1]
    assert len(replicas.calls) == 1


def test_a_request_is_looked_for_at_every_replica():
    async def draw(call: Any) -> AsyncIterator[Any]:
        name = next((name for name in "abc" if name not in call.excluded), "a")
        yield name
        found = name == "b" and call.path.endswith("/mine")
        for item in answer_with(200 if found else 404, name.encode()):
            yield item

    replicas = FakeReplicas(draw)
    answer = ask(replicas, "DELETE", "/v1/requests/mine")
    assert (answer.status_code, answer.headers["x-replica"]) == (200, "b")
    assert len(replicas.calls) == 2
    assert ask(replicas, "GET", "/v1/requests/other").status_code == 404
    assert [call.excluded for call in replicas.calls[2:]] == [
        frozenset(),
        frozenset("a"),
        frozenset("ab"),
        frozenset("abc"),
    ]


def test_a_request_is_looked_for_first_where_it_was_sent():
    async def draw(_: Any) -> AsyncIterator[Any]:
        yield "b"
        for item in answer_with(200, b"{}"):
            yield item

    async def run(replicas: FakeReplicas) -> None:
        transport = httpx.ASGITransport(Gateway(replicas, SETTINGS))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await client.post("/v1/images/generations", json=SMALL, headers={"x-request-id": "mine"})
            await client.get("/v1/requests/mine")

    replicas = FakeReplicas(draw)
    asyncio.run(run(replicas))
    assert replicas.calls[1].preferred == "b"


def test_a_client_that_leaves_is_told_to_the_replica():
    async def run() -> FakeReplicas:
        has_started = asyncio.Event()

        async def draw(_: Any) -> AsyncIterator[Any]:
            yield "a"
            has_started.set()
            await asyncio.Event().wait()

        replicas = FakeReplicas(draw)
        requests = [{"type": "http.request", "body": json.dumps(SMALL).encode()}]

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await has_started.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": "/v1/images/generations", "query_string": b"", "headers": []}
        await Gateway(replicas, SETTINGS)(scope, receive, lambda _: asyncio.sleep(0))
        return replicas

    assert asyncio.run(run()).num_closed == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"size": "64x32", "num_inference_steps": 5, "true_cfg_scale": 1}, Work(5, 1, 8)),
        ({"size": "64x32", "num_inference_steps": 5, "n": 3}, Work(5, 6, 8)),
        ({}, Work(50, 2, None)),
        ({"size": "auto"}, Work(50, 2, None)),
        ({"n": "three"}, None),
        ({"n": -3}, None),
        ({"num_inference_steps": 51}, None),
    ],
)
def test_the_work_in_a_request(fields, expected):
    assert work_of(json.dumps({"prompt": "x", **fields}).encode(), SETTINGS) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"n": NaN}'])
def test_a_body_that_makes_no_sense_is_left_to_the_replica(body):
    assert work_of(body, SETTINGS) is None


def call_of(key: str, work: Any = None, **fields: Any) -> Any:
    return Call(key, "POST", "/v1/images/generations", b"", [], b"", "http", None, None, work, **fields)


def test_only_a_fixed_seed_is_drawn_again():
    assert is_idempotent(SimpleNamespace(method="GET"))
    for fields, expected in (({"seed": 0}, True), ({}, False), ({"seed": None}, False)):
        call = SimpleNamespace(method="POST", body=json.dumps({"prompt": "x", **fields}).encode())
        assert is_idempotent(call) is expected


# ---------------------------------------------------------------------- who gets it, and how many there are

STATS = {"backlog_s": 2.0, "s_per_token": 0.01, "num_default_image_tokens": 10, "known": []}


def test_what_was_sent_counts_until_the_replica_has_it():
    backlogs = Backlogs()
    backlogs.send("a", call_of("1", Work(5, 2, 20)))
    backlogs.send("a", call_of("2", Work(5, 2, None)))
    assert backlogs.seconds("a", STATS) == pytest.approx(2.0 + 5 * 2 * (20 + 10) * 0.01)
    assert backlogs.seconds("b", STATS) == 2.0
    assert backlogs.seconds("a", {**STATS, "known": ["1"]}) == pytest.approx(2.0 + 1.0)
    assert backlogs.seconds("a", STATS) == pytest.approx(2.0 + 1.0)  # it does not come back
    backlogs.send("b", call_of("2", Work(5, 2, None)))  # tried again elsewhere
    assert backlogs.seconds("a", STATS) == 2.0
    backlogs.keep({"a"})
    assert backlogs.seconds("b", STATS) == 2.0


def route(replicas: dict[str, float], *calls: Any) -> list[list[str]]:
    """The order in which replicas of known backlogs are tried for each call, one after another."""
    router = QueueCostRouter.__new__(QueueCostRouter)
    router.initialize_state()
    fakes = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={**STATS, "backlog_s": seconds})
        for name, seconds in replicas.items()
    ]
    orders = []
    for call in calls:
        ranks = asyncio.run(router.choose_replicas(fakes, SimpleNamespace(args=[call])))
        orders.append([replica.replica_id.unique_id for (replica,) in ranks])
    return orders


def test_the_shortest_queue_gets_it_and_is_longer_then():
    work = Work(10, 1, 10)  # a second
    calls = [call_of(str(number), work) for number in range(4)]
    assert route({"a": 0.0, "b": 1.5, "c": 9.0}, *calls) == [
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["b", "a", "c"],
        ["a", "b", "c"],
    ]


def test_a_call_may_prefer_or_exclude_replicas():
    replicas = {"a": 0.0, "b": 1.0, "c": 2.0}
    assert route(replicas, call_of("1", preferred="c")) == [["c", "a", "b"]]
    assert route(replicas, call_of("1", preferred="gone")) == [["a", "b", "c"]]
    assert route(replicas, call_of("1", excluded=frozenset("ab"))) == [["c"]]
    assert route(replicas, call_of("1", excluded=frozenset("abc"))) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("waits", "expected"),
    [({"a": 0.0, "b": 0.0}, 1), ({"a": 50.0, "b": 15.0}, 3), ({"a": 60.0, "b": 0.0}, 2), ({}, 7)],
)
def test_there_are_as_many_replicas_as_keep_the_wait_short(waits, expected):
    context = SimpleNamespace(aggregated_metrics={WAIT_METRIC: waits} if waits else {}, target_num_replicas=7)
    assert PredictedWaitPolicy(30.0)(context) == (expected, {})


def test_the_router_works_in_another_process_which_needs_no_torch():
    """Ray Serve pickles it, by value, and the gateway's calls must be the calls that it knows."""
    config = router_config()
    assert config.get_request_router_class() is QueueCostRouter
    code = """if True:
        import sys
        from diffusers_continuous.serving import ray_app
        from ray import cloudpickle
        router = cloudpickle.loads(sys.stdin.buffer.read())
        assert router.choose_replicas.__globals__["Call"] is ray_app.Call
        assert "torch" not in sys.modules
    """
    content = config.get_serialized_request_router_cls()
    assert subprocess.run([sys.executable, "-c", code], input=content, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_replica": "2"}, r"option='max_replica' is not known.*did you mean 'max_replicas'"),
        ({"min_replicas": "0"}, "min_replicas='0': .*greater than or equal to 1"),
        ({"min_replicas": "2", "max_replicas": "1"}, "max_replicas=1 is less than min_replicas=2"),
        ({"max_n": "few", "drain_s": "-1"}, "max_n='few': .*integer"),
        ({"drain_s": "-1"}, r"drain_s=-1\.0 must be at least 0"),
        ({"allow_unauthenticated": "perhaps"}, "allow_unauthenticated='perhaps': .*boolean"),
        ({"engine": "slo_scal=2"}, r"engine: option='slo_scal' is not known.*did you mean 'slo_scale'"),
        ({"engine": "compile=maybe"}, "engine: compile='maybe' must be True or False"),
        ({"engine": ["max_queue_size=0"], "max_queue": "5"}, "engine: max_queue_size=0 contradicts max_queue=5"),
        ({"metrics_prefix": "vllm-omni"}, "metrics_prefix='vllm-omni' is not known.*vllm_omni"),
    ],
)
def test_options_of_serve_run_are_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        app(options)


def test_serve_run_has_the_options_of_the_plain_server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(API_KEY_VARIABLE, "sesame")
    (tmp_path / "pid").mkdir()
    built: list[Any] = []
    monkeypatch.setattr(ray_app, "build_app", lambda *args, **options: built.extend((*args, options)))
    app(
        {
            "model": "org/other",
            "served_model_name": "a,b",
            "decoder_model": "pid",
            "media_dir": "media",
            "metrics_prefix": "vllm_omni",
            "cors_origin": ["https://a.example"],  # as in a config file
            "max_body_bytes": "1000",
            "max_queue": "3",
            "engine": "compile=true,slo_scale=2,calibration=cost.json",
            "max_batch": "2",
            "max_size": "64",
            "max_steps": "5",
            "max_n": "1",
            "drain_s": "1.5",
            "gpus_per_replica": "0.5",
            "allow_unauthenticated": "true",
        }
    )
    make_pipe, settings, options = built
    assert make_pipe.args == ("org/other", str(tmp_path / "pid"))  # replicas may work in another folder
    assert settings == ServingSettings(
        model_names=("a", "b"),
        engine_config=ContinuousBatchingConfig(
            max_queue_size=3,
            max_requests_per_batch=2,
            compile=True,
            slo_scale=2,
            calibration=str(tmp_path / "cost.json"),
        ),
        max_size=64,
        max_steps=5,
        max_n=1,
        max_body_bytes=1000,
        api_key="sesame",
        cors_origins=("https://a.example",),
        media_dir=tmp_path / "media",
        metrics_prefix="vllm_omni",
        drain_s=1.5,
    )
    assert options["allow_unauthenticated"]
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0.5}


def test_serve_run_starts_from_the_plain_servers_defaults(monkeypatch):
    from diffusers_continuous.cli import serve

    settings: list[ServingSettings] = []
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    monkeypatch.setattr(ray_app, "build_app", lambda _, own, **options: settings.append(own))
    app({})
    assert settings == [serve._settings(serve._parser().parse_all([]))]


@pytest.mark.parametrize(
    ("host", "api_key", "allow_unauthenticated", "is_refused"),
    [
        ("0.0.0.0", None, False, True),
        ("::", None, False, True),
        ("0.0.0.0", "sesame", False, False),
        ("0.0.0.0", None, True, False),
        ("127.0.0.1", None, False, False),
        (None, None, False, False),
    ],
)
def test_other_machines_get_in_only_where_somebody_said_so(
    monkeypatch, host, api_key, allow_unauthenticated, is_refused
):
    monkeypatch.setattr(ray_app, "proxy_host", lambda: host)
    settings = replace(SETTINGS, api_key=api_key)
    expected = pytest.raises(ConfigError, match=f"{host}.*{API_KEY_VARIABLE}.*allow_unauthenticated=true")
    with expected if is_refused else contextlib.nullcontext():
        ray_app.make_gateway(FakeReplicas(print), settings, allow_unauthenticated)
