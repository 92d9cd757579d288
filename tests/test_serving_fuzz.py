"""The server against whatever its own OpenAPI document allows and forbids: no crash, no undeclared answer, no leak.

200 cases by default; `make fuzz` sets FUZZ_CASES=2000.
"""

from __future__ import annotations

import os
from collections import Counter
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
BOTH, VALID = tuple(GenerationMode), (GenerationMode.POSITIVE,)  # what takes any text cannot be given a wrong one
# Which part of the cases an operation gets: most where most can go wrong. Without parameters there is one case.
SHARES = {
    ("/v1/images/generations", "POST", BOTH): 0.8,
    ("/media/{name}", "GET", BOTH): 0.05,
    ("/v1/requests/{request_id}", "GET", VALID): 0.05,
    ("/v1/requests/{request_id}", "DELETE", VALID): 0.05,
    ("/v1/models/{name}", "GET", VALID): 0.05,
    ("/v1/models", "GET", VALID): 0.0,
    ("/metrics", "GET", VALID): 0.0,
    ("/health", "GET", VALID): 0.0,
    ("/v1/health", "GET", VALID): 0.0,
}
RUNS = [
    (path, method, mode, max(1, round(NUM_CASES * share / len(modes))))
    for (path, method, modes), share in SHARES.items()
    for mode in modes
]
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
    named = {(path, method.upper()) for path in schema for method in schema[path]}
    assert named == {(path, method) for path, method, _ in SHARES}


@pytest.mark.parametrize(("path", "method", "mode", "num_cases"), RUNS)
def test_no_case_breaks_it(server, schema, path, method, mode, num_cases):
    answers: Counter[int] = Counter()
    strategy = schema[path][method].as_strategy(generation_mode=mode)

    @seed(0)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case):
        answers[case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60).status_code] += 1

    run()
    print(method, path, mode.value, dict(answers))
    if method == "POST" and mode is GenerationMode.POSITIVE:
        assert answers[200] > num_cases / 20  # else little was drawn at all
    assert server.http.get("/health").status_code == 200
    assert_nothing_is_left(server)
