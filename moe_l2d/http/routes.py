"""Which requests the engine computes on, in one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    slot: bool  # occupies one of the engine's slots, so it queues for one
    json: bool  # its body is a JSON object that may name `model` and `stream`
    embeddings: bool = False  # it needs engine.embeddings


INFERENCE = Route(slot=True, json=True)
EMBEDDING = Route(slot=True, json=True, embeddings=True)
CHEAP = Route(slot=False, json=False)
# Not in the table: to wait for a slot needlessly costs little, to be one too many in the engine costs much.
UNKNOWN_POST = Route(slot=True, json=False)

POST: dict[str, Route] = {
    "/v1/chat/completions": INFERENCE,
    "/chat/completions": INFERENCE,
    "/v1/completions": INFERENCE,
    "/completions": INFERENCE,
    "/completion": INFERENCE,
    "/infill": INFERENCE,
    "/v1/embeddings": EMBEDDING,
    "/embeddings": EMBEDDING,
    "/embedding": EMBEDDING,
    "/v1/messages": INFERENCE,
    "/v1/responses": INFERENCE,
    "/responses": INFERENCE,
    "/v1/rerank": INFERENCE,
    "/v1/reranking": INFERENCE,
    "/rerank": INFERENCE,
    "/reranking": INFERENCE,
    "/api/chat": INFERENCE,
    "/v1/audio/transcriptions": UNKNOWN_POST,  # multipart
    "/v1/messages/count_tokens": CHEAP,
    "/tokenize": CHEAP,
    "/detokenize": CHEAP,
    "/apply-template": CHEAP,
    "/props": CHEAP,
    "/lora-adapters": CHEAP,
}


def route_of(method: str, path: str) -> Route:
    """The row for a request; anything but a POST only reads, /props and /slots for instance."""
    if method != "POST":
        return CHEAP
    return POST.get(path.rstrip("/") or "/", UNKNOWN_POST)
