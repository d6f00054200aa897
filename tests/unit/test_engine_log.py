"""moe_l2d/engine/spawn.py: what of the engine's output may be seen."""

from __future__ import annotations

import logging

import pytest

from moe_l2d.engine.spawn import EngineLog

SECRET = "SECRETPROMPT"
ABOUT_REQUESTS = (
    f"0.00.362.301 W srv  operator(): got exception: {{\"message\": \"Missing 'role' in message: {SECRET}\"}}",
    f"0.00.362.301 E srv  send_error: failed to parse grammar: {SECRET} out of memory GGML_ASSERT",
    f"terminate called after throwing an exception: {SECRET}",
    f"what():  [json.exception.parse_error.101] ... {SECRET}",
    f"failed to apply template: {SECRET}",
)


@pytest.mark.parametrize("line", ABOUT_REQUESTS)
def test_no_request_is_quoted(line: str, caplog: pytest.LogCaptureFixture) -> None:
    """While it serves, what the engine says about requests reaches no log, at any level, and no reason of a death."""
    caplog.set_level(logging.DEBUG)
    engine_log = EngineLog()
    engine_log.serving = True
    engine_log.add(line)
    assert SECRET not in caplog.text
    assert SECRET not in engine_log.reason


def test_what_the_engine_says_of_itself_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Before it serves every line is kept; later those of the plug-in, with their own level, and of ggml."""
    caplog.set_level(logging.DEBUG)
    engine_log = EngineLog()
    engine_log.add("0.00.100.000 E srv  load_model: failed to load model, '/m.gguf'")
    assert "failed to load model" in engine_log.reason
    engine_log.serving = True
    engine_log.add("0.00.200.000 E moe-l2: cannot read expert 1 of block 0: the model file ends too early")
    engine_log.add("0.00.200.000 W moe-l2: the arena of moe-l2d is not used: another engine uses the arena")
    engine_log.add("/src/ggml.c:77: GGML_ASSERT(n > 0) failed")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["engine: moe-l2: cannot read expert 1 of block 0: the model file ends too early"] == "ERROR"
    assert levels["engine: moe-l2: the arena of moe-l2d is not used: another engine uses the arena"] == "WARNING"
    assert "GGML_ASSERT" in engine_log.reason
