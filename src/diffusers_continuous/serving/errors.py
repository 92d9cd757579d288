"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "code", "param"}}`."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import Response
from starlette.exceptions import HTTPException

from diffusers_continuous.errors import (
    ContinuousBatchingError,
    DeadlineError,
    EngineStoppedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    shorten,
)

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An answer that is an error. `param` is the field that is wrong, `code` a word for programs."""

    def __init__(
        self,
        status_code: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, headers)
        self.message, self.code, self.param = message, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that clients get."""
        kind = "server_error" if self.status_code >= 500 else _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The answer itself."""
        # Escaped, since a message may repeat characters that cannot be encoded.
        content = json.dumps(self.body, ensure_ascii=True)
        return Response(content, self.status_code, {**(self.headers or {}), **(headers or {})}, "application/json")


def api_error(error: BaseException, fields: Iterable[str] = ()) -> ApiError:
    """The answer to a request that ended with `error`; `fields` are those that its text may be about."""
    message = str(error) or type(error).__name__
    match error:
        case ApiError():
            return error
        case QueueFullError():
            retry_after = max(1, math.ceil(error.retry_after_s))
            return ApiError(429, message, "queue_full", headers={"Retry-After": str(retry_after)})
        case RequestError():
            return ApiError(400, message, "invalid_value", _param_of(message, fields))
        case RequestCancelledError():
            return ApiError(499, message, "request_cancelled")
        case DeadlineError():
            return ApiError(503, message, "deadline_exceeded")
        case EngineStoppedError():
            return ApiError(503, message, "engine_stopped")
        case ContinuousBatchingError():
            return ApiError(500, message, "request_failed")
    return ApiError(500, f"{type(error).__name__}: {message}", "internal_error")


def _param_of(message: str, fields: Iterable[str]) -> str | None:
    """The field that a message of the engine is about: it names the argument first."""
    names = re.findall(r"\w+", message)
    return next((name for name in names if name in set(fields)), None)


# A body may be wrong in a hundred thousand ways; so many are enough to put it right.
MAX_TOLD_PROBLEMS = 8


def invalid_request(problems: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> ApiError:
    """The answer to a body or header that is not what it should be, from Pydantic's list of what is wrong."""
    fields = list(fields)
    lines, params = [], []
    is_unknown = False
    for problem in itertools.islice(problems, MAX_TOLD_PROBLEMS):
        where = [str(part) for part in problem["loc"][1:]]
        param = where[0] if where else None
        if problem["type"] == "extra_forbidden":
            is_unknown = True
            lines.append(_unknown_parameter(where[0], fields))
        elif problem["type"] == "missing":
            lines.append(f"{param or 'the body'}: it is required")
        elif problem["type"] == "model_attributes_type" and param is None:
            lines.append("the body must be a JSON object, sent with Content-Type: application/json")
        elif problem["type"] == "json_invalid":
            lines.append(f"the body is no valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
            param = None
        else:
            value = "" if param is None else f"={shorten(problem.get('input'))}"
            lines.append(f"{param or 'the body'}{value}: {problem['msg']}")
        params.append(param)
    code = "unknown_parameter" if is_unknown else "invalid_value"
    return ApiError(400, "; ".join(lines), code, next((param for param in params if param), None))


def _unknown_parameter(name: str, known: Sequence[str]) -> str:
    name = name[:64]  # no parameter has as many characters
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown parameter {name!r}{hint}; known are {', '.join(sorted(known))}"
