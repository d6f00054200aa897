"""OpenAI's shapes: errors, the list of models, and the two fields of a request that concern us."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from moe_l2d.errors import BadRequest, MoeError, NotFound
from moe_l2d.request import Asked

REFUSED_BY = "x-moe-l2-refused-by"  # tells a client whether moe-l2d or the engine said no
ANY_MODEL = "auto"


class ModelNotFound(NotFound):
    code: ClassVar[str] = "model_not_found"
    param: ClassVar[str] = "model"


# json takes 8 ms for a MiB, in which no stream moves; larger bodies (images) are only searched, at GiB/s.
PARSED_BYTES = 1 << 20
_STRUCTURE = re.compile(rb'[][{}"]')
_VALUE = re.compile(rb'\s*:\s*("(?:[^"\\]|\\.){0,300}"|[a-z0-9.+-]{1,40})(?=\s*[,}])')  # no list, no object


def understand(body: bytes, served: str) -> Asked:
    """`model` and `stream` of a JSON body. BadRequest if it is no JSON object, ModelNotFound for another model."""
    try:
        fields = json.loads(body) if len(body) <= PARSED_BYTES else search(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"cannot read the request's body: not valid JSON, {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("cannot read the request's body: it must be a JSON object, {...}")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("cannot read 'model': it must be a string")
    if model and model not in (served, ANY_MODEL):
        raise ModelNotFound(
            f"cannot find model '{model[:200]}': this service serves '{served}'; name that, or '{ANY_MODEL}', or none"
        )
    return Asked(model=model, stream=fields.get("stream") is True)


def search(body: bytes) -> dict[str, Any] | None:
    """`model` and `stream` of a JSON object, without parsing the rest; None if it is no object.

    Whether the rest is valid JSON is left to the engine. ValueError for a string without an end.
    """
    if body.lstrip()[:1] != b"{":
        return None
    found: dict[str, Any] = {}
    depth = at = 0
    while mark := _STRUCTURE.search(body, at):
        at = mark.end()
        if mark[0] in b"{[":
            depth += 1
        elif mark[0] in b"}]":
            depth -= 1
        else:
            start, at = at, _end_of_string(body, at)
            name = body[start : at - 1] if at - start < 10 else b""
            if depth == 1 and name in (b"model", b"stream") and (value := _VALUE.match(body, at)):
                found[name.decode()] = json.loads(value[1])
                at = value.end()
    return found


def _end_of_string(body: bytes, start: int) -> int:
    """The place after the quote that ends the string whose text begins at `start`."""
    at = start
    while (at := body.find(b'"', at)) >= 0:
        text = at
        while text > start and body[text - 1] == 0x5C:
            text -= 1
        at += 1
        if (at - 1 - text) % 2 == 0:
            return at
    raise ValueError("a string has no end")


def error_body(error: MoeError) -> bytes:
    """The error as one line of JSON."""
    fields = {
        "message": str(error),
        "type": _type_of(error.http_status),
        "code": error.code,
        "param": getattr(error, "param", None),
    }
    return json.dumps({"error": fields}, separators=(",", ":")).encode()


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"


def models_body(name: str, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_entry(name, created)]}


def model_entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "moe-l2"}
