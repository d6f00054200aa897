"""Values of one request. None of them ever holds text that a user wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "client_left", "engine_died", "error"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the body says that concerns us; the body itself goes on unchanged."""

    model: str | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request as the engine counts them; None where it did not say."""

    prompt_tokens: int | None = None
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was read and understood."""

    id: str
    path: str
    model: str | None
    stream: bool
    started: float  # time.monotonic() when its head arrived


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is known once a request is over."""

    id: str
    path: str
    status: int  # as sent to the client; 499 if it left before any was sent
    outcome: Outcome
    prompt_tokens: int | None  # as the engine counted, None where it did not say
    generated_tokens: int | None  # of a stream that was cut: the events that carried data
    queued_s: float  # from the body's end to the engine's taking it
    ttft_s: float | None  # from the head's arrival to the first streamed event; None if nothing was streamed
    total_s: float
