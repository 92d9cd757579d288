"""`diffusers-continuous bench`, against servers whose behaviour is known, and what other benchmarks send to ours."""

from __future__ import annotations

import http.server
import json
import math
import random
import threading

import httpx
import pytest

from diffusers_continuous.cli import bench, main, workload
from live_server import assert_nothing_is_left
from live_server import serve as serve_pictures

SMALL = ["--mix", "0.5:64:2,0.5:64:4", "--requests", "12", "--alone", "1"]


class FakeServer(http.server.ThreadingHTTPServer):
    """Draws a picture in no time, or whatever `answer(body)` says; remembers what it was asked."""

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.answer = answer
        self.bodies, self.headers = [], []
        self.most_at_once = self.num_open = 0
        self.lock = threading.Lock()


class FakeHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(200, {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.num_open += 1
            server.most_at_once = max(server.most_at_once, server.num_open)
        self._send(*server.answer(body))
        with server.lock:
            server.num_open -= 1

    def _send(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def picture(_body):
    return 200, {"data": [{"b64_json": "AA==", "seed": 1}]}


@pytest.fixture
def serve():
    started = []

    def start(answer=picture):
        server = FakeServer(answer)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        started.append((server, thread))
        return server, f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def run(capsys, *argv):
    assert main(["bench", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_last_line_is_json_with_a_result_per_rate(serve, capsys):
    server, url = serve()
    result = run(capsys, "--url", url, "--rate", 200, 400, *SMALL)
    assert [each["rate_per_s"] for each in result["results"]] == [200, 400]
    for each in result["results"]:
        assert set(each["kinds"]) == {"all", "64px/2", "64px/4"}
        assert each["num_failed"] == 0
        assert each["p50_latency_s"] <= each["p95_latency_s"] <= each["p99_latency_s"]
        assert {"attainment_1.5x", "attainment_2x", "attainment_3x"} <= set(each["kinds"]["all"])
    assert len(server.bodies) == 2 * 12 + 2 * 2  # of each kind one that warms up and one that counts
    assert {(body["size"], body["num_inference_steps"]) for body in server.bodies} == {("64x64", 2), ("64x64", 4)}
    assert all("model" not in body and "deadline_s" not in body for body in server.bodies)


def test_requests_do_not_wait_for_each_other(serve, capsys):
    """The server answers nobody before all have come, which a client that waits for answers would never see."""
    num_requests = 12
    gate = threading.Barrier(num_requests)
    calls = iter(range(10**6))

    def answer(body):
        if next(calls) >= 4:  # the first are sent alone
            gate.wait(60)
        return picture(body)

    server, url = serve(answer)
    result = run(capsys, "--url", url, "--rate", 1000, *SMALL)
    assert server.most_at_once == num_requests
    assert result["results"][0]["num_failed"] == 0


def test_a_load_is_a_part_of_what_is_served_one_at_a_time(serve, capsys):
    _, url = serve()
    result = run(capsys, "--url", url, "--load", 0.5, 2, *SMALL)
    rates = [each["rate_per_s"] / result["serial_requests_per_s"] for each in result["results"]]
    assert rates == pytest.approx([0.5, 2], rel=1e-2)
    assert [each["load"] for each in result["results"]] == pytest.approx([0.5, 2], rel=1e-2)


def test_what_fails_is_late_and_told_why(serve, capsys):
    error = {"error": {"message": "the queue is full", "type": "rate_limit_error", "code": "queue_full", "param": None}}
    lock, calls = threading.Lock(), iter(range(10**6))

    def answer(body):
        with lock:
            number = next(calls)
        return (429, error) if number >= 4 and number % 2 else picture(body)

    _, url = serve(answer)
    result = run(capsys, "--url", url, "--rate", 1000, *SMALL)["results"][0]
    assert result["failures"] == {"HTTP 429: the queue is full": 6}
    assert result["num_failed"] == 6
    assert result["p95_latency_s"] == "inf"
    assert result["kinds"]["all"]["attainment_3x"] <= 0.5


def test_answers_that_are_no_pictures_are_failures(serve):
    server = bench.Server(serve(lambda body: (200, {"data": []}))[1], None, None, 4.0, 60.0)
    assert "IndexError" in server.generate("x", (64, 2), 0)
    gone = bench.Server("http://127.0.0.1:9", None, None, 4.0, 60.0)
    assert "refused" in gone.generate("x", (64, 2), 0)


def test_model_key_and_deadline_are_told(serve, capsys):
    server, url = serve()
    options = ["--model", "tiny", "--api-key", "secret", "--deadline", 3, "--cfg", 1]
    result = run(capsys, "--url", url + "/", "--rate", 500, *options, *SMALL)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert {(body["model"], body["true_cfg_scale"]) for body in server.bodies} == {("tiny", 1.0)}
    alone, later = server.bodies[:4], server.bodies[4:]
    assert all("deadline_s" not in body for body in alone)
    for body in later:
        usual = result["alone_s"][f"64px/{body['num_inference_steps']}"]
        assert body["deadline_s"] == pytest.approx(3 * usual, rel=1e-3)


def test_latency_counts_from_when_a_request_was_due():
    class Late(bench.Server):
        def generate(self, *_):
            return None

    due = [-10.0, -5.0]  # they should have been sent before the start
    server = Late("http://x", None, None, 4.0, 1.0)
    answers = bench.serve(server, [(64, 2)] * 2, due, [None] * 2)
    assert answers[0].latency_s >= 9.0
    assert answers[1].latency_s >= 4.0


def test_summary_of_known_latencies():
    kinds = [(64, 2)] * 50 + [(64, 4)] * 50
    usual = {(64, 2): 1.0, (64, 4): 2.0}
    answers = [bench.Answer(1.4)] * 50 + [bench.Answer(5.0)] * 49 + [bench.Answer(math.inf, "HTTP 500")]
    result = bench.summary(2.0, kinds, [0.0] * 100, answers, usual)
    assert result["load"] == pytest.approx(2.0 * 1.5)
    assert result["kinds"]["64px/2"]["attainment_1.5x"] == 1.0
    assert result["kinds"]["64px/4"]["attainment_2x"] == 0.0
    assert result["kinds"]["all"]["attainment_3x"] == pytest.approx(0.99)
    assert result["served_per_s"] == pytest.approx(99 / 5.0)
    assert (result["p50_latency_s"], result["p99_latency_s"]) == (1.4, 5.0)
    assert result["failures"] == {"HTTP 500": 1}


def test_the_same_seed_asks_for_the_same(serve, capsys):
    bodies = []
    for _ in range(2):
        server, url = serve()
        run(capsys, "--url", url, "--rate", 1000, "--seed", 5, *SMALL)
        bodies.append(sorted(json.dumps(body, sort_keys=True) for body in server.bodies))
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("name", sorted(workload.ARRIVALS))
def test_arrivals_begin_at_once_and_have_mean_gaps_of_about_one(name):
    times = workload.arrival_times(name, 5000, random.Random(1))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 0.5 < times[-1] / 5000 < 1.2


def test_a_server_that_is_not_there_or_ill_is_told(serve, capsys):
    assert main(["bench", "--url", "http://127.0.0.1:9", *SMALL]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    _, url = serve(lambda body: (400, {"error": {"message": "size 64x64: too small"}}))
    assert main(["bench", "--url", url, *SMALL]) == 1
    assert "64x64 and 2 steps failed: HTTP 400: size 64x64: too small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mix", "rfk"], ["'rfk'", "did you mean 'rfc'?", "SHARE:SIDE:STEPS"]),
        (["--mix", "0:64:2"], ["'0:64:2'", "not above 0"]),
        (["--rate", "0"], ["'0'", "above 0"]),
        (["--rate", "1", "--load", "1"], ["not allowed with"]),
        (["--requests", "1"], ["'1'", "at least 2"]),
        (["--url", "localhost:8000"], ["'localhost:8000'", "http://"]),
        (["--shrink", "100"], ["--shrink 100", "10x10 is out of range"]),
        (["--shrink", "7", "--mix", "0.7:120:10"], ["--shrink 7", "17x17", "16x16 and 32x32"]),
        (["--mix", "0.7:17:10"], ["0.7:17:10", "17x17 is not a multiple of 16"]),
        (["--rte", "1"], ["'--rte'", "did you mean '--rate'?"]),
    ],
)
def test_a_mistake_is_told(arguments, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert all(part in message for part in expected), message


def test_asking_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, diffusers_continuous.cli.bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# our own server


@pytest.fixture(scope="module")
def pictures(components):
    with serve_pictures(components) as server:
        yield server
        assert_nothing_is_left(server)


def test_it_measures_our_own_server(pictures, capsys):
    options = ["--load", 0.8, "--cfg", 1, "--deadline", 3, "--model", "tiny"]
    result = run(capsys, "--url", pictures.url, *options, *SMALL)
    assert result["results"][0]["failures"] == {}
    assert result["results"][0]["kinds"]["all"]["p50_slowdown"] > 0


@pytest.mark.parametrize("optional", [{}, {"seed": 42, "negative_prompt": "Negative prompt 0"}])
def test_vllm_omnis_benchmark_is_served(pictures, optional):
    """What its `diffusion_benchmark_serving.py --backend openai --task t2i` sends, and what it reads of the answers."""
    assert httpx.get(f"{pictures.url}/health", timeout=60).status_code == 200
    body = {
        "model": "org/tiny",
        "prompt": "Random prompt 0 for benchmarking diffusion models",
        "n": 1,
        "size": "64x64",
        "response_format": "b64_json",
        "num_inference_steps": 2,
        **optional,
    }
    headers = {"Content-Type": "application/json", "Authorization": "Bearer EMPTY"}
    answer = httpx.post(f"{pictures.url}/v1/images/generations", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    content = answer.json()
    assert content["data"][0]["b64_json"]
    assert isinstance(content["usage"], dict)
    assert content.get("choices", []) == []
