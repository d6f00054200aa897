"""moe_l2d/config.py and etc/moe-l2.toml"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_l2d import config
from moe_l2d.config import Config, parse
from moe_l2d.errors import ConfigError
from tests.conftest import ROOT

FILE = ROOT / "etc" / "moe-l2.toml"
KEYS = [(s.name, f) for s in dataclasses.fields(Config) for f in dataclasses.fields(getattr(Config(), s.name))]
NUMBERS = [(s, f) for s, f in KEYS if f.metadata["low"] is not None]


def test_file_equals_defaults() -> None:
    """The shipped file says exactly what the built-in defaults are."""
    assert parse(FILE.read_text()) == Config()


def test_file_is_complete() -> None:
    """The shipped file names every key, and its comment gives the range that is enforced."""
    text = FILE.read_text()
    tree = tomllib.loads(text)
    lines = text.splitlines()
    for section, field in KEYS:
        assert field.name in tree[section]
        comment = lines[next(i for i, x in enumerate(lines) if x.startswith(f"{field.name} = ")) - 1]
        assert comment.startswith("# ")
        if field.metadata["low"] is not None:
            low, high = (config.plain(field.metadata[x]) for x in ("low", "high"))
            assert f"({low} to {high}" in "".join(x for x in lines if x.startswith("# ")), field.name


def toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


@given(st.sampled_from(NUMBERS), st.data())
def test_out_of_range_is_refused(key: tuple[str, Any], data: st.DataObject) -> None:
    """A number outside its range is refused with key, value and both limits named, and never clamped."""
    section, field = key
    low, high = int(field.metadata["low"]), int(field.metadata["high"])
    value = data.draw(st.one_of(st.integers(max_value=low - 1), st.integers(min_value=high + 1)))
    with pytest.raises(ConfigError) as refused:
        parse(f"[{section}]\n{field.name} = {value}")
    sentence = str(refused.value)
    assert f"{section}.{field.name} '{value}'" in sentence
    assert config.plain(field.metadata["low"]) in sentence
    assert config.plain(field.metadata["high"]) in sentence


@given(st.sampled_from(NUMBERS), st.data())
def test_in_range_is_taken(key: tuple[str, Any], data: st.DataObject) -> None:
    """Every whole number within the range is taken as it is, unless two keys contradict each other."""
    section, field = key
    low, high = field.metadata["low"], field.metadata["high"]
    value = data.draw(st.integers(int(low + 0.999), int(high)))
    try:
        loaded = parse(f"[{section}]\n{field.name} = {value}")
    except ConfigError as error:
        assert "must not be above" in str(error) or "must stay below" in str(error)  # noqa: PT017
        return
    assert getattr(getattr(loaded, section), field.name) == value


@given(st.from_regex(r"[a-z_]{1,20}", fullmatch=True), st.sampled_from([f.name for f in dataclasses.fields(Config)]))
def test_unknown_key_is_refused(name: str, section: str) -> None:
    """A key that does not exist is refused by name, in any section and at the top."""
    known = {f.name for f in dataclasses.fields(getattr(Config(), section))}
    if name not in known:
        with pytest.raises(ConfigError, match=rf"{section}\.{name}"):
            parse(f"[{section}]\n{name} = 1")
    if name not in {f.name for f in dataclasses.fields(Config)}:
        with pytest.raises(ConfigError, match=f"'{name}'"):
            parse(f"{name} = 1")


ODD = ["1.5", "1", "true", '"x\\u0007"', "[1]", "1979-05-27", "nan", "{}", '""']


@given(st.sampled_from(KEYS), st.sampled_from(ODD))
def test_wrong_type_is_refused_with_a_sentence(key: tuple[str, Any], value: str) -> None:
    """Whatever a key is set to, the answer is a Config or one sentence that names the key; nothing else escapes."""
    section, field = key
    try:
        parse(f"[{section}]\n{field.name} = {value}")
    except ConfigError as error:
        assert f"{section}.{field.name}" in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No text makes the parser fail in another way than ConfigError."""
    with contextlib.suppress(ConfigError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[server]\nlisten = "11435"', ["server.listen '11435'", "ADDRESS:PORT"]),
        ('[server]\nlisten = "localhost:99999"', ["65535"]),
        ('[server]\nlisten = "example.org:80"', ["IP address"]),
        ('[server]\nlisten = "::1:80"', ["brackets"]),
        ('[server]\nlisten = "0.0.0.0:80"', ["'0.0.0.0:80'", "no authentication", "allow_unauthenticated"]),
        ('[engine]\nextra_args = ["--port", "1"]', ["engine.extra_args '--port'", "moe-l2d sets"]),
        ('[engine]\nextra_args = ["--no_mmap"]', ["'--no_mmap'"]),
        ("[engine]\nrestart_backoff_s = 90", ["restart_backoff_s '90.0'", "restart_backoff_max_s", "60"]),
        ("[arena]\npreload = 'some'", ["arena.preload 'some'", "all, none"]),
        ('[model]\npath = "relative.gguf"', ["model.path", "absolute"]),
        ('[model]\npath = "/x.bin"', [".gguf"]),
        (f'[paths]\nruntime_dir = "/{"x" * 90}"', ["paths.runtime_dir", "80 bytes"]),
        ("[engine]\nrepack = 1", ["engine.repack '1'", "true or false"]),
        ("[server\n", ["not valid TOML"]),
    ],
)  # fmt: skip
def test_sentences(text: str, parts: list[str]) -> None:
    """Each refusal is one sentence with the key, the value and the cause."""
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert str(refused.value).startswith("cannot ")
    for part in parts:
        assert part in str(refused.value)


def test_open_address_on_request() -> None:
    """An address that others reach is taken when that is said, too."""
    text = '[server]\nlisten = "0.0.0.0:80"\nallow_unauthenticated = true'
    assert parse(text).server.host_port == ("0.0.0.0", 80)


def test_load_names_the_file(tmp_path: Any) -> None:
    """An error in a file names the file; a missing one is refused, too."""
    path = tmp_path / "x.toml"
    with pytest.raises(ConfigError, match=r"x\.toml': no such file"):
        config.load(path)
    path.write_text("[log]\nlevel = 'loud'")
    with pytest.raises(ConfigError, match=r"log\.level 'loud'.*x\.toml"):
        config.load(path)


def test_changed_keys() -> None:
    """Only the keys that differ are named."""
    new = parse("[log]\nlevel = 'debug'\n[server]\nmax_waiting = 3")
    assert config.changed_keys(Config(), new) == ["server.max_waiting", "log.level"]
