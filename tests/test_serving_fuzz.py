"""The server against whatever its own OpenAPI document allows and forbids: no crash, no undeclared answer, no leak.

200 cases by default; `make fuzz` sets FUZZ_CASES=2000.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from live_server import LiveServer, assert_nothing_is_left, serve

NUM_CASES = int(os.environ.get("FUZZ_CASES", "200"))
# Most of them where most can go wrong.
SHARES = {
    ("/v1/images/generations", "POST"): 0.7,
    ("/v1/requests/{request_id}", "GET"): 0.05,
    ("/v1/requests/{request_id}", "DELETE"): 0.05,
    ("/v1/models/{name}", "GET"): 0.05,
    ("/media/{name}", "GET"): 0.05,
    ("/v1/models", "GET"): 0.025,
    ("/metrics", "GET"): 0.025,
    ("/health", "GET"): 0.025,
    ("/v1/health", "GET"): 0.025,
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(components, tmp_path_factory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("media")
    with serve(components, max_steps=2, max_size=96, max_n=2, media_dir=folder) as server:
        yield server


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())


def test_the_document_names_every_route(schema):
    assert {(path, method.upper()) for path in schema for method in schema[path]} == set(SHARES)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), list(SHARES))
def test_no_case_breaks_it(server, schema, path, method, mode):
    operation = schema[path][method]

    @seed(0)
    @settings(
        max_examples=max(1, round(NUM_CASES * SHARES[path, method] / 2)),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)

    run()
    assert server.http.get("/health").status_code == 200
    assert_nothing_is_left(server)
