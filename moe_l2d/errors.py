"""The one tree of errors that people and programs see.

    MoeError            code              HTTP  exit
    |- ConfigError      config             500    78
    |- ModelError       model              500     1
    |- EngineError      engine             502     1
    |  `- EngineNotReady engine_not_ready  503     1
    |- QueueFull        queue_full         429    75
    |- BadRequest       bad_request        400     2
    |- NotFound         not_found          404     5
    |- TooLarge         too_large          413     2
    |- Denied           denied             403     4
    |- NotServed        not_served         501     1
    |- NotRunning       not_running        503     3
    |- Timeout          timeout            504     6
    `- Busy             busy               409    75

`str(error)` is one sentence: "cannot <verb> <object> '<value>': <cause>", then what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class MoeError(Exception):
    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class ConfigError(MoeError):
    code = "config"
    exit_code = 78


class ModelError(MoeError):
    code = "model"


class EngineError(MoeError):
    code = "engine"
    http_status = 502


class EngineNotReady(EngineError):
    code = "engine_not_ready"
    http_status = 503


class QueueFull(MoeError):
    code = "queue_full"
    http_status = 429
    exit_code = 75


class BadRequest(MoeError):
    code = "bad_request"
    http_status = 400
    exit_code = 2


class NotFound(MoeError):
    code = "not_found"
    http_status = 404
    exit_code = 5


class TooLarge(MoeError):
    code = "too_large"
    http_status = 413
    exit_code = 2


class Denied(MoeError):
    code = "denied"
    http_status = 403
    exit_code = 4


class NotServed(MoeError):
    """It could be served, and the configuration says no."""

    code = "not_served"
    http_status = 501


class NotRunning(MoeError):
    code = "not_running"
    http_status = 503
    exit_code = 3


class Timeout(MoeError):
    code = "timeout"
    http_status = 504
    exit_code = 6


class Busy(MoeError):
    code = "busy"
    http_status = 409
    exit_code = 75


ALL: tuple[type[MoeError], ...] = (
    MoeError,
    ConfigError,
    ModelError,
    EngineError,
    EngineNotReady,
    QueueFull,
    BadRequest,
    NotFound,
    TooLarge,
    Denied,
    NotRunning,
    Timeout,
    Busy,
)

_BY_CODE = {kind.code: kind for kind in ALL}


def from_code(code: str, message: str) -> MoeError:
    """The error that a peer named by its stable word; an unknown word becomes a plain MoeError."""
    return _BY_CODE.get(code, MoeError)(message)
