"""The server as its clients see it: OpenAI's own client over a real socket, and whatever that one would never send."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from conftest import assert_pictures_equal, generator
from diffusers_continuous import PiDDecoder, StepScheduler, embedded
from diffusers_continuous.cli import main
from diffusers_continuous.serving import jobs
from diffusers_continuous.serving.jobs import partial_steps
from live_server import LiveServer, assert_nothing_is_left, picture_of, serve
from test_engine import Gate

GENERATIONS = "/v1/images/generations"
SMALL = {"prompt": "a red star", "size": "64x64", "num_inference_steps": 3, "true_cfg_scale": 1.0}


@pytest.fixture(scope="module")
def server(components) -> Iterator[LiveServer]:
    """For tests that leave it as they found it."""
    with serve(components) as server:
        yield server
        assert_nothing_is_left(server)


@contextmanager
def held(server: LiveServer, at_step: int = 2) -> Iterator[Gate]:
    """The engine stops before that piece of work from now on, until the gate is opened."""
    execute = server.engine.runner.execute
    gate = Gate(server.engine, at_step)
    try:
        yield gate
    finally:
        gate.opened.set()
        server.engine.runner.execute = execute


@contextmanager
def posted(server: LiveServer, body: dict[str, Any], request_id: str) -> Iterator[socket.socket]:
    """A bare connection on which a request has been sent; closed at the end, whatever came back."""
    content = json.dumps(body).encode()
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must be in OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    return body["error"]


# ---------------------------------------------------------------------- pictures


def test_a_picture_is_the_stock_pipelines(server, stock):
    call = {"num_inference_steps": 4, "true_cfg_scale": 3.0, "negative_prompt": "blue"}
    answer = server.generate("a red star on a blue background", size="96x64", seed=5, **call)
    expected = stock("a red star on a blue background", width=96, height=64, generator=generator(5), **call).images[0]
    assert_pictures_equal(picture_of(answer.data[0]), expected)
    assert (answer.size, answer.output_format, answer.background) == ("96x64", "png", "opaque")
    assert answer.data[0].seed == 5
    assert answer.usage.output_tokens == 6 * 4
    assert answer.usage.total_tokens == answer.usage.output_tokens + answer.usage.input_tokens
    assert answer.metrics["num_inference_steps"] == 4
    assert 0 < answer.metrics["queue_wait_s"] < answer.metrics["latency_s"]


def test_vllm_omnis_benchmark_finds_the_peak_of_the_devices_memory(server, monkeypatch):
    """It reads `usage.peak_memory_mb`, in MiB, where there is one."""
    assert "peak_memory_mb" not in server.http.post(GENERATIONS, json=SMALL).json()["usage"]  # a CPU keeps no peak
    monkeypatch.setattr(jobs, "peak_reserved_bytes", lambda device: 3 * 2**19)
    assert server.http.post(GENERATIONS, json=SMALL).json()["usage"]["peak_memory_mb"] == 1.5


def test_without_a_negative_prompt_guidance_leads_away_from_a_space(server):
    given = server.generate(seed=5, true_cfg_scale=4.0, negative_prompt=" ").data[0].b64_json
    assert server.generate(seed=5, true_cfg_scale=4.0).data[0].b64_json == given
    assert server.generate(seed=5, true_cfg_scale=1.0).data[0].b64_json != given


def test_a_seed_repeats_and_every_picture_of_a_request_can_be_drawn_alone(server):
    first, second = server.generate(n=2, seed=7).data
    assert (first.seed, second.seed) == (7, 8)
    alone = server.generate(seed=8).data[0]
    assert server.generate(seed=8).data[0].b64_json == alone.b64_json
    assert_pictures_equal(picture_of(alone), picture_of(second))
    assert first.b64_json != second.b64_json


def test_a_seed_that_was_drawn_is_told_and_repeats(server):
    one, other = server.generate().data[0], server.generate().data[0]
    assert one.seed != other.seed
    assert server.generate(seed=one.seed).data[0].b64_json == one.b64_json


def test_auto_is_the_models_own_size(server):
    answer = server.generate(size="auto")
    assert (answer.size, picture_of(answer.data[0]).size) == ("128x128", (128, 128))


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_other_formats_and_their_compression(server, output_format):
    best, small = (
        server.generate(
            "a red star on a blue background",
            output_format=output_format,
            seed=1,
            output_compression=percent,
            size="128x128",
        )
        for percent in (100, 5)
    )
    assert (best.output_format, picture_of(best.data[0]).format) == (output_format, output_format.upper())
    assert len(small.data[0].b64_json) < len(best.data[0].b64_json)


def test_what_has_no_effect_is_said(server):
    answer = server.generate(guidance_scale=3.0, negative_prompt="blue")
    assert len(answer.warnings) == 2
    assert "guidance_scale" in answer.warnings[0]
    assert "negative_prompt" in answer.warnings[1]


def test_pid_makes_pictures_of_the_size_that_was_asked_for(components):
    decoder = PiDDecoder.from_pretrained(embedded.embedded_decoder_path())
    decoder.set_progress_bar_config(disable=True)
    with serve(components, decoder) as server:
        answer = server.generate(size="256x256", early_stop_steps=1)
        assert picture_of(answer.data[0]).size == (256, 256)
        assert answer.usage.output_tokens == 16  # it was denoised at 64 x 64
        assert picture_of(server.generate(size="64x80", decoder="vae").data[0]).size == (64, 80)
        with pytest.raises(openai.BadRequestError, match=r"64x80.*64x64 and 64x128"):
            server.generate(size="64x80")


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize(("num_partials", "num_steps"), [(0, 3), (1, 3), (2, 6), (3, 9), (3, 2)])
def test_as_many_previews_as_were_asked_for_and_then_the_picture(server, num_partials, num_steps):
    events = list(
        server.generate(stream=True, partial_images=num_partials, num_inference_steps=num_steps, size="96x64", seed=3)
    )
    *partials, last = events
    assert [event.type for event in partials] == ["image_generation.partial_image"] * num_partials
    assert [event.partial_image_index for event in partials] == list(range(num_partials))
    assert {picture_of(event).size for event in events} == {(96, 64)}
    assert len({event.b64_json for event in partials}) == min(num_partials, num_steps)
    assert last.type == "image_generation.completed"
    assert (last.seed, last.size, last.output_format, last.quality) == (3, "96x64", "png", "auto")
    assert last.usage.output_tokens == 24
    assert last.metrics["num_inference_steps"] == num_steps
    whole = server.generate(num_inference_steps=num_steps, size="96x64", seed=3)
    assert_pictures_equal(picture_of(last), picture_of(whole.data[0]))


def test_previews_that_cannot_be_made_in_time_show_the_picture(server, monkeypatch):
    monkeypatch.setattr(server.engine.runner, "preview_of", lambda state: list)
    *partials, last = server.generate(stream=True, partial_images=2, seed=3)
    assert [event.partial_image_index for event in partials] == [0, 1]
    assert [event.b64_json for event in partials] == [last.b64_json] * 2


def test_previews_are_spread_over_the_steps(server, monkeypatch):
    assert partial_steps(3, 20) == [5, 10, 15]
    assert partial_steps(2, 50) == [17, 33]
    assert partial_steps(3, 2) == [1, 1, 2]
    assert partial_steps(0, 20) == []
    preview_of, drawn = server.engine.runner.preview_of, []

    def noting(state: Any) -> Any:
        step, draw = state.step, preview_of(state)
        return lambda: (drawn.append(step), draw())[1]

    monkeypatch.setattr(server.engine.runner, "preview_of", noting)
    list(server.generate(stream=True, partial_images=2, num_inference_steps=6))
    assert drawn == [2, 4]


def test_every_event_says_its_type_on_both_lines(server):
    body = {**SMALL, "stream": True, "partial_images": 1}
    with server.http.stream("POST", GENERATIONS, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = "".join(response.iter_text())
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    kinds = [event.removeprefix("event: ") for event, _ in events]
    assert kinds == ["image_generation.partial_image", "image_generation.completed"]
    assert [json.loads(data.removeprefix("data: "))["type"] for _, data in events] == kinds


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"size": "97x96"}, "size", "97x96 .* 96x96 and 112x96"),
        ({"size": "512x64"}, "size", "512x64 .* 16 to 256 pixels"),
        ({"size": "100000x10000"}, "size", "16 to 256 pixels"),
        ({"size": "0x64"}, "size", "out of range"),
        ({"size": "1024x"}, "size", "'1024x' is not WIDTHxHEIGHT"),
        ({"size": "-64x64"}, "size", "out of range"),
        ({"n": 5}, "n", "n=5: .* 4"),
        ({"n": 0}, "n", "n=0: .* 1"),
        ({"n": "2"}, "n", "n='2': .* integer"),
        ({"num_inference_steps": 51}, "num_inference_steps", "=51: .* 50"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "x" * 32001}, "prompt", "at most 32000 characters"),
        ({"prompt": ["a", "b"]}, "prompt", "valid string"),
        ({"steps": 3}, "steps", "^unknown parameter 'steps'.*; known are background, .*num_inference_steps"),
        ({"sed": 3}, "sed", "^unknown parameter 'sed' .did you mean 'seed'"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**70}, "seed", "less than or equal to"),
        ({"true_cfg_scale": float("nan")}, "true_cfg_scale", "finite"),
        ({"deadline_s": 0}, "deadline_s", "greater than 0"),
        ({"quality": "high"}, "quality", "'auto'"),
        ({"style": "natural"}, "style", "'vivid'"),
        ({"background": "transparent"}, "background", "'opaque'"),
        ({"moderation": "low"}, "moderation", "'auto'"),
        ({"response_format": "url"}, "response_format", "media-dir"),
        ({"output_format": "gif"}, "output_format", "'webp'"),
        ({"output_compression": 50}, "output_compression", "jpeg and webp"),
        ({"partial_images": 4, "stream": True}, "partial_images", "=4: .* 3"),
        ({"partial_images": 2}, "partial_images", "stream"),
        ({"stream": True, "n": 2}, "n", "use 1"),
        ({"decoder": "pid"}, "decoder", "--decoder-model"),
        ({"early_stop_steps": 1}, "early_stop_steps", "=1 leaves noise that only decoder='pid'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_its_limit(server, fields, param, words):
    content = json.dumps({**SMALL, **fields})
    response = server.http.post(GENERATIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(words, error["message"]), error["message"]


def test_openais_client_raises_its_own_errors(server):
    with pytest.raises(openai.BadRequestError, match="multiple of 16") as bad:
        server.generate(size="97x96")
    assert (bad.value.param, bad.value.code, bad.value.type) == ("size", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="'gpt-image-1' is not served here; this is 'tiny'") as missing:
        server.generate(model="gpt-image-1")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no valid JSON"),
        (b"", "required"),
        (b"[]", "the body must be a JSON object"),
        (b'"a red star"', "the body must be a JSON object"),
        (b'{"size": "64x64"}', "prompt: it is required"),
        (b"[" * 100_000, "pars"),
        (b'{"prompt": "\\ud800", "\\ud800": 1}', "valid string"),
        (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "pars"),
    ],
)
def test_a_body_that_is_none(server, content, words):
    response = server.http.post(GENERATIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert words in error_of(response)["message"]


def test_a_body_that_is_not_sent_as_json(server):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d does by itself
    response = server.http.post(GENERATIONS, content=json.dumps(SMALL), headers=headers)
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_what_is_not_there_and_what_cannot_be_done(server):
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/requests/nobody", 404),
        ("DELETE", "/v1/requests/nobody", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/media/" + "0" * 32 + ".png", 404),
        ("GET", GENERATIONS, 405),
    ]:
        response = server.http.request(method, path)
        assert response.status_code == status, path
        assert error_of(response)["type"] == "invalid_request_error"
    assert server.http.put(GENERATIONS).headers["Allow"] == "POST"


def test_a_long_body_is_refused_before_it_is_read(components):
    with serve(components, max_body_bytes=1000) as server:
        assert server.http.post(GENERATIONS, json=SMALL).status_code == 200
        response = server.http.post(GENERATIONS, json={**SMALL, "prompt": "x" * 1000})
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        chunks = (b" " * 100 for _ in range(11))  # whose length is not announced
        response = server.http.post(GENERATIONS, content=chunks, headers={"Content-Type": "application/json"})
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert "1000 bytes" in error_of(response)["message"]


# ---------------------------------------------------------------------- the key


def test_only_who_has_the_key_gets_in(components):
    with serve(components, api_key="sesame") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/health").status_code == 200
        for authorization in (None, "Bearer wrong", "Bearer", "sesame", "Basic sesame", "Bearer sésame"):
            headers = {} if authorization is None else {"Authorization": authorization.encode()}
            for path in ("/v1/models", "/metrics", "/openapi.json", "/media/x", "/nothing"):
                response = httpx.get(f"{server.url}{path}", headers=headers)
                assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer"), path
                assert error_of(response)["type"] == "authentication_error"
        headers = {"Authorization": "Bearer sesame"}
        assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 200
        document = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
        assert "401" in document["paths"]["/v1/models"]["get"]["responses"]
    with pytest.raises(SystemExit) as refused:
        main(["serve", "--host", "0.0.0.0"])
    assert refused.value.code == 2


def test_web_pages_of_other_origins_get_in_only_where_they_may(components, server):
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert server.http.options(GENERATIONS, headers=headers).status_code == 405
    assert "access-control-allow-origin" not in server.http.get("/health", headers=headers).headers
    own = ("http://localhost:3000", "http://[::1]:80", "chrome-extension://abc", "https://example.org")
    with serve(components, cors_origins=own, api_key="key") as other:
        answer = httpx.options(f"{other.url}{GENERATIONS}", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        headers["Origin"] = "https://example.com"
        assert httpx.options(f"{other.url}{GENERATIONS}", headers=headers).status_code == 400


# ---------------------------------------------------------------------- one request's life


def test_a_request_tells_where_it_stands(server):
    for prompt in ("a ring", "a cross", "a heart"):  # so that durations are known
        server.generate(prompt)
    with held(server, at_step=3) as gate, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, GENERATIONS, json=SMALL, headers={"X-Request-Id": "mine"})
        assert gate.reached.wait(60)
        info = server.request("mine")
        assert (info["status"], info["queue_position"], info["num_steps"]) == ("running", 0, 3)
        assert info["step"] == 2
        assert info["eta_s"] > 0
        in_use = server.http.post(GENERATIONS, json=SMALL, headers={"X-Request-Id": "mine"})
        assert (in_use.status_code, error_of(in_use)["code"]) == (400, "request_id_in_use")
        gate.opened.set()
        assert answer.result().headers["X-Request-Id"] == "mine"
    assert server.wait_for("mine", "finished")["step"] == 3
    assert "result" not in server.request("mine")  # its client has it
    bad = server.http.post(GENERATIONS, json=SMALL, headers={"X-Request-Id": "a b"})
    assert (bad.status_code, error_of(bad)["param"]) == (400, "x-request-id")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request_before_the_next_step(server, stream):
    with held(server, at_step=3) as gate:
        before = server.engine.stats()
        with posted(server, {**SMALL, "num_inference_steps": 50, "stream": stream}, f"left-{stream}"):
            assert gate.reached.wait(60)
        server.wait_for(f"left-{stream}", "cancelled")
        gate.opened.set()
        server.generate()  # comes after the step that was under way
        after = server.engine.stats()
    assert after.num_steps - before.num_steps == 3 + 3
    assert after.num_by_status["cancelled"] == before.num_by_status.get("cancelled", 0) + 1
    assert_nothing_is_left(server)


def test_a_client_that_leaves_the_queue_leaves_no_ghost(components):
    with serve(components, max_requests_per_batch=1) as server, held(server, at_step=1) as gate:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.generate)
            assert gate.reached.wait(60)
            with posted(server, SMALL, "waits"):
                server.wait_until_queued("waits")
                assert server.request("waits")["queue_position"] == 1
            server.wait_for("waits", "cancelled")
            gate.opened.set()
            first.result()
        assert server.engine.stats().num_decoded_rows == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_detached_request_goes_on_without_its_client(server, stream):
    name = f"detached-{stream}"
    body = {**SMALL, "seed": 9, "detach": True, "stream": stream, "size": "96x64"}
    with held(server, at_step=2) as gate:
        with posted(server, body, name):
            assert gate.reached.wait(60)
        assert server.http.get("/health").status_code == 200
        gate.opened.set()
        info = server.wait_for(name, "finished")
    assert info["result"]["size"] == "96x64"
    expected = server.generate(seed=9, size="96x64").data[0]
    assert_pictures_equal(picture_of(info["result"]["data"][0]), picture_of(expected))


def test_a_request_can_be_cancelled_from_elsewhere(server):
    with held(server, at_step=2) as gate, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, GENERATIONS, json=SMALL, headers={"X-Request-Id": "unwanted"})
        assert gate.reached.wait(60)
        assert server.http.delete("/v1/requests/unwanted").json()["cancelled"]
        response = answer.result()  # told at once, although the step still runs
        assert (response.status_code, error_of(response)["code"]) == (499, "request_cancelled")
        assert response.headers["X-Request-Id"] == "unwanted"
        gate.opened.set()
    assert not server.http.delete("/v1/requests/unwanted").json()["cancelled"]
    assert server.request("unwanted")["status"] == "cancelled"


def test_a_stream_that_is_cancelled_says_so(server):
    with held(server, at_step=2) as gate:
        stream = server.client.with_options(default_headers={"X-Request-Id": "cut"}).images.generate(
            prompt="a red star", stream=True, size="64x64", extra_body={"num_inference_steps": 5}
        )
        assert gate.reached.wait(60)
        server.http.delete("/v1/requests/cut")
        with pytest.raises(openai.APIError, match="'cut' was cancelled") as cancelled:
            list(stream)
        gate.opened.set()
    assert cancelled.value.code == "request_cancelled"


# ---------------------------------------------------------------------- when there is no room, or no engine


def test_a_full_queue_says_when_to_come_again(components):
    with serve(components, max_queue_size=1, max_requests_per_batch=1) as server, ThreadPoolExecutor(2) as pool:
        server.generate()  # so that durations are known
        with held(server, at_step=2) as gate:
            runs = pool.submit(server.http.post, GENERATIONS, json=SMALL)
            assert gate.reached.wait(60)
            waits = pool.submit(server.http.post, GENERATIONS, json=SMALL, headers={"X-Request-Id": "waits"})
            server.wait_until_queued("waits")
            with pytest.raises(openai.RateLimitError, match="max_queue_size=1") as full:
                server.generate()
            assert int(full.value.response.headers["Retry-After"]) >= 1
            assert (full.value.code, full.value.type) == ("queue_full", "rate_limit_error")
            with pytest.raises(openai.BadRequestError, match="max_queue_size=1"):
                server.generate(n=2)
            gate.opened.set()
            assert [runs.result().status_code, waits.result().status_code] == [200, 200]
        assert_nothing_is_left(server)


def test_a_dead_engine_tells_everybody_why(components, monkeypatch):
    with serve(components) as server, ThreadPoolExecutor(2) as pool:
        with held(server, at_step=2) as gate:
            answer = pool.submit(server.http.post, GENERATIONS, json=SMALL)
            stream = pool.submit(server.http.post, GENERATIONS, json={**SMALL, "stream": True})
            assert gate.reached.wait(60)
            while server.engine.stats().num_running_requests + server.engine.stats().num_waiting_requests < 2:
                assert not stream.done()

            def kill(*_: Any) -> None:
                raise ZeroDivisionError("a bug in deciding")

            monkeypatch.setattr(StepScheduler, "schedule", kill)
            gate.opened.set()
            assert answer.result().status_code == 503
            assert "a bug in deciding" in error_of(answer.result())["message"]
            assert "event: error" in stream.result().text
            assert "a bug in deciding" in stream.result().text
        for response in (server.http.get("/health"), server.http.post(GENERATIONS, json=SMALL)):
            assert response.status_code == 503
            assert "a bug in deciding" in error_of(response)["message"]
            assert error_of(response)["type"] == "server_error"
        assert server.http.get("/metrics").status_code == 200


def test_a_failure_of_one_request_is_its_own(server):
    model = server.engine.runner._model
    denoise_step = model.denoise_step

    def failing(batch: Any) -> Any:
        if any(row.request.request_id == "bad" for row in batch.rows):
            raise ValueError("broken row")
        return denoise_step(batch)

    model.denoise_step = failing
    try:
        bad = server.http.post(GENERATIONS, json=SMALL, headers={"X-Request-Id": "bad"})
        assert server.http.post(GENERATIONS, json=SMALL).status_code == 200
    finally:
        del model.denoise_step
    assert (bad.status_code, error_of(bad)["type"], error_of(bad)["code"]) == (500, "server_error", "request_failed")
    assert "step 1 of 3" in error_of(bad)["message"]
    assert server.request("bad")["error"]["code"] == "request_failed"


def test_a_server_that_stops_finishes_what_it_accepted(components):
    with serve(components) as server, ThreadPoolExecutor(1) as pool:
        with held(server, at_step=2) as gate:
            answer = pool.submit(server.http.post, GENERATIONS, json=SMALL)
            assert gate.reached.wait(60)
            server.server.should_exit = True
            while (health := server.http.get("/health")).status_code == 200:
                pass
            assert error_of(health)["code"] == "shutting_down"
            assert httpx.post(f"{server.url}{GENERATIONS}", json=SMALL).status_code == 503
            gate.opened.set()
            assert answer.result().status_code == 200
        server.stop()
        assert server.engine.is_stopped


def test_what_does_not_finish_in_time_fails_with_a_reason(components):
    with serve(components, drain_s=0) as server, ThreadPoolExecutor(2) as pool, held(server, at_step=2) as gate:
        answer = pool.submit(server.http.post, GENERATIONS, json=SMALL)
        stream = pool.submit(server.http.post, GENERATIONS, json={**SMALL, "stream": True})
        assert gate.reached.wait(60)
        while server.engine.stats().num_running_requests + server.engine.stats().num_waiting_requests < 2:
            assert not stream.done()
        server.server.should_exit = True
        assert answer.result().status_code == 503
        assert "was stopped before this request finished" in error_of(answer.result())["message"]
        assert "was stopped before this request finished" in stream.result().text
        gate.opened.set()


@pytest.mark.parametrize(("host", "words"), [("127.0.0.1", "is in use"), ("192.0.2.1", "cannot listen there")])
def test_an_address_that_cannot_be_had_is_told_before_anything_is_loaded(host, words, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as refused:
            main(["serve", "--host", host, "--allow-unauthenticated", "--port", str(port)])
    message = capsys.readouterr().err
    assert refused.value.code == 2
    assert f"--port {port}" in message
    assert words in message
    assert "loading" not in message


def test_the_command_serves_and_stops_at_a_signal(tmp_path):
    command = [sys.executable, "-m", "diffusers_continuous.cli", "serve", "--port", "0", "--drain-s", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                url = found[1]
                break
        assert url is not None
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny-qwen-image"
        body = {**SMALL, "num_inference_steps": 200}
        with httpx.stream("POST", f"{url}{GENERATIONS}", json={**body, "stream": True}, timeout=60) as response:
            process.send_signal(signal.SIGTERM)
            assert "was stopped before this request finished" in "".join(response.iter_text())
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in rest
    assert process.returncode == -signal.SIGTERM


# ---------------------------------------------------------------------- pictures on disk


def test_pictures_as_urls(components, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"not yours")
    folder = tmp_path / "media"
    with serve(components, media_dir=folder, api_key="key") as server:
        one, other = server.generate(n=2, response_format="url", seed=4).data
        assert one.b64_json is None
        assert re.fullmatch(re.escape(server.url) + r"/media/[0-9a-f]{32}\.png", one.url)
        assert httpx.get(one.url).status_code == 401
        picture = server.http.get(one.url)
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")
        (folder / ("1" * 32 + ".png")).symlink_to(tmp_path / "secret.png")
        os.mkfifo(folder / ("2" * 32 + ".png"))
        for name in ("1" * 32 + ".png", "2" * 32 + ".png", "3" * 32 + ".png"):
            assert server.http.get(f"/media/{name}").status_code == 404
        for name in ("secret.png", "..%2Fsecret.png", "%2e%2e/secret.png", "x" * 32 + ".png"):
            assert server.http.get(f"/media/{name}").status_code in (400, 404)
        assert sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()) == sorted(
            data.url.rpartition("/")[2] for data in (one, other)
        )
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            server.generate(stream=True, response_format="url")


# ---------------------------------------------------------------------- information


def test_the_model_has_its_names(server):
    assert [model.id for model in server.client.models.list()] == ["tiny", "org/tiny"]
    assert server.client.models.retrieve("org/tiny").id == "org/tiny"
    assert server.generate(model="org/tiny").data


def metrics_of(server: LiveServer) -> dict[str, float]:
    """Every sample by its name and labels, without the model's name."""
    text = server.http.get("/metrics").text
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {re.sub(r',?model_name="tiny",?', "", name).replace("{}", ""): float(value) for name, value in samples}


def test_metrics_count_what_happened(components):
    with serve(components, max_requests_per_batch=1) as server, ThreadPoolExecutor(2) as pool:
        with held(server, at_step=2) as gate:
            first = pool.submit(server.generate, seed=1, deadline_s=3600.0)
            assert gate.reached.wait(60)
            second = pool.submit(
                server.http.post, GENERATIONS, json={**SMALL, "deadline_s": 1e-6}, headers={"X-Request-Id": "second"}
            )
            server.wait_until_queued("second")
            now = metrics_of(server)
            assert now["diffusers_continuous:num_requests_running"] == 1
            assert now["diffusers_continuous:num_requests_waiting"] == 1
            gate.opened.set()
            first.result()
            assert second.result().status_code == 200
        with held(server, at_step=2) as gate:
            with posted(server, SMALL, "left"):
                assert gate.reached.wait(60)
            server.wait_for("left", "cancelled")
        server.generate(n=2)
        now = {name.removeprefix("diffusers_continuous:"): value for name, value in metrics_of(server).items()}
    assert (now["num_requests_running"], now["num_requests_waiting"], now["num_used_blocks"]) == (0, 0, 0)
    assert now['requests_success_total{finished_reason="stop"}'] == 3
    assert now['requests_success_total{finished_reason="abort"}'] == 1
    assert now['requests_success_total{finished_reason="error"}'] == 0
    assert now["image_count_total"] == 4
    assert now["e2e_request_latency_s_count"] == 3
    assert now["request_queue_wait_s_count"] == 4
    assert now['slo_requests_total{outcome="missed"}'] >= 1
    assert now['slo_requests_total{outcome="met"}'] + now['slo_requests_total{outcome="missed"}'] == 3
    assert now["slack_at_finish_s_count"] == 3
    num_steps = server.engine.stats().num_steps
    assert now["rows_per_step_count"] == now["tokens_per_step_count"] == num_steps
    assert now["rows_per_step_sum"] == num_steps  # one at a time
    assert now["tokens_per_step_sum"] == now["step_tokens_total"] > 16 * num_steps
    assert sum(value for name, value in now.items() if name.startswith("step_s_count")) == num_steps
    assert now["padding_tokens_total"] == now["preemptions_total"] == now['swap_bytes_total{direction="out"}'] == 0


def test_padding_is_counted_beside_the_tokens_that_somebody_wants(make_pipe):
    pipe = make_pipe(batch_layout="padded")
    call = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0, "output_type": "latent"}
    ids = [
        pipe._engine.add_request(prompt=prompt, **call) for prompt in ("a ring", "a large red star on a blue ground")
    ]
    pipe._engine.start()
    short, long = (pipe._engine.get_result(name, timeout=60).metrics.num_prompt_tokens for name in ids)
    stats = pipe._engine.stats()
    assert short < long
    assert stats.num_step_tokens == 3 * (2 * 16 + short + long)
    assert stats.num_padding_tokens == 3 * (long - short)


def test_metrics_under_vllm_omnis_names(components):
    with serve(components, metrics_prefix="vllm_omni") as server:
        server.generate()
        now = metrics_of(server)
    names = ("num_requests_running", "num_requests_waiting", "e2e_request_latency_s_count", "request_queue_wait_s_sum")
    assert all(f"vllm_omni:{name}" in now for name in names)
    assert now['vllm_omni:requests_success_total{finished_reason="stop"}'] == 1
    assert not any(name.startswith("diffusers_continuous") for name in now)


def test_the_event_loop_answers_while_requests_are_made(server, monkeypatch):
    make_request = server.engine._make_request
    entered, go_on = threading.Event(), threading.Event()

    def slow(**arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return make_request(**arguments)

    monkeypatch.setattr(server.board._pipe, "_make_request", slow, raising=False)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, GENERATIONS, json=SMALL, headers={"X-Request-Id": "slow"})
        assert entered.wait(60)
        assert server.http.get("/health").status_code == 200
        assert server.request("slow")["status"] == "waiting"
        assert server.http.delete("/v1/requests/slow").json()["cancelled"]  # before the engine knows of it
        go_on.set()
        assert answer.result().status_code == 499
