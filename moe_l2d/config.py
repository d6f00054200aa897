"""The configuration: parsed, validated, frozen. Values out of range are refused, never clamped.

parse() is pure. The dataclasses below are the one table of keys, defaults, ranges and their meaning;
etc/moe-l2.toml shows the same to people and a test compares the two.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_l2d.engine.flags import is_owned
from moe_l2d.errors import ConfigError
from moe_l2d.model.placement import check_arena

LEVELS = ("debug", "info", "warning", "error")
PRELOADS = ("all", "none")


def _key(default: Any, help: str, *, low: float | None = None, high: float | None = None, unit: str = "",
         choices: tuple[str, ...] = (), check: Callable[[str, Any], None] | None = None) -> Any:
    metadata = {"help": help, "low": low, "high": high, "unit": unit, "choices": choices, "check": check}
    if isinstance(default, list):
        return field(default=tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _refuse(key: str, value: object, cause: str) -> ConfigError:
    shown = f"'{value}'" if isinstance(value, str) else f"'{value!r}'"
    return ConfigError(f"cannot use {key} {shown}: {cause}")


def split_address(key: str, value: str) -> tuple[str, int]:
    """("127.0.0.1", 11435) of "127.0.0.1:11435"; IPv6 in brackets, "localhost" as it is."""
    host, colon, port = value.rpartition(":")
    if not colon or not host:
        raise _refuse(key, value, "it must be ADDRESS:PORT, for instance 127.0.0.1:11435")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _refuse(key, value, "the port must be a number from 0 to 65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if bare != "localhost":
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            raise _refuse(key, value, "the address must be an IP address or localhost") from None
        if address.version == 6 and bare == host:
            raise _refuse(key, value, "an IPv6 address must stand in brackets, for instance [::1]:11435")
    return bare, int(port)


@functools.lru_cache(maxsize=256)  # asked twice for each HTTP request
def is_loopback(host: str) -> bool:
    """Is it a name or address (IPv6 without brackets) of this machine's loopback?"""
    name = host.lower().removesuffix(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _check_address(key: str, value: str) -> None:
    split_address(key, value)


def _check_path(key: str, value: str) -> None:
    if value and not value.startswith("/"):
        raise _refuse(key, value, "it must be an absolute path")


def _check_needed_path(key: str, value: str) -> None:
    if not value:
        raise _refuse(key, value, "it must be an absolute path, not empty")
    _check_path(key, value)


def _check_socket_path(key: str, value: str) -> None:
    _check_path(key, value)
    if len(value.encode()) > 100:
        raise _refuse(key, value, "a Unix socket's path may have 100 bytes at most")


def _check_runtime_dir(key: str, value: str) -> None:
    _check_needed_path(key, value)
    if len(value.encode()) > 80:
        raise _refuse(key, value, "it may have 80 bytes at most, since the sockets' paths are built from it")


def _check_model_path(key: str, value: str) -> None:
    if value == "auto":
        return
    _check_needed_path(key, value)
    if not value.endswith(".gguf"):
        raise _refuse(key, value, 'it must be "auto" or the path of a .gguf file')


def _check_extra_args(key: str, value: tuple[str, ...]) -> None:
    for argument in value:
        if is_owned(argument):
            raise _refuse(key, argument, "moe-l2d sets this flag itself, remove it from engine.extra_args")
        if "\0" in argument:
            raise _refuse(key, argument, "it holds a NUL character")


@dataclass(frozen=True)
class Server:
    listen: str = _key("127.0.0.1:11435", "address and port of the HTTP API; port 0 takes any free one",
                       check=_check_address)
    allow_unauthenticated: bool = _key(
        False, "let listen be an address that others reach; whoever does may use the model")
    max_body_mib: int = _key(64, "largest request body", low=1, high=1024, unit="MiB")
    max_waiting: int = _key(64, "requests that may wait for a slot beyond those running; more get status 429",
                            low=0, high=10000)
    queue_timeout_s: float = _key(300.0, "how long a request may wait for a slot", low=1, high=86400, unit="s")
    drain_s: float = _key(30.0, "how long running requests may go on once the daemon is told to stop",
                          low=0, high=3600, unit="s")
    write_timeout_s: float = _key(60.0, "how long a client may take to accept what was sent to it",
                                  low=1, high=3600, unit="s")

    @property
    def host_port(self) -> tuple[str, int]:
        return split_address("server.listen", self.listen)


@dataclass(frozen=True)
class Control:
    socket: str = _key("", "path of the control socket; empty: control.sock in paths.runtime_dir",
                       check=_check_socket_path)


@dataclass(frozen=True)
class Model:
    path: str = _key("auto", 'a .gguf (the first of several shards), or "auto": the newest of paths.models_dir',
                     check=_check_model_path)
    name: str = _key("", "name of the model in the API; empty: the file's name without .gguf")
    context: int = _key(4096, "context length of each slot", low=256, high=1048576, unit="tokens")


@dataclass(frozen=True)
class Engine:
    dir: str = _key("", "directory of llama-server; empty: $MOE_L2_ENGINE_DIR, then /usr/lib/moe-l2/engine",
                    check=_check_path)
    slots: int = _key(2, "requests that the engine computes at the same time", low=1, high=256)
    threads: int = _key(0, "threads of the engine; 0: the physical cores that the daemon may use", low=0, high=1024)
    start_timeout_s: float = _key(600.0, "how long the engine may take to load the model before it is started again",
                                  low=1, high=86400, unit="s")
    stall_s: float = _key(120.0, "how long the engine may show no progress on its requests before it is restarted",
                          low=1, high=86400, unit="s")
    restart_backoff_s: float = _key(1.0, "pause before the first restart of an engine that died; doubled each time",
                                    low=0.05, high=3600, unit="s")
    restart_backoff_max_s: float = _key(60.0, "longest such pause", low=0.05, high=3600, unit="s")
    repack: bool = _key(True, "let the CPU backend rearrange weights for speed")
    embeddings: bool = _key(
        False, "serve /v1/embeddings, too; prompts take longer then, every token of them has an output")
    extra_args: tuple[str, ...] = _key([], "more arguments for llama-server; none that moe-l2d sets itself",
                                       check=_check_extra_args)


@dataclass(frozen=True)
class Arena:
    preload: str = _key("all", "experts to load before they are used", choices=PRELOADS)
    preload_mib_per_s: int = _key(0, "bound on the reads of the preload; 0: none", low=0, high=1000000, unit="MiB/s")
    loaders: int = _key(4, "threads that read experts", low=1, high=64)


@dataclass(frozen=True)
class Memory:
    arena: str = _key("auto", 'most memory for experts: a size ("6GB"), "all", or "auto", what is free',
                      check=check_arena)


@dataclass(frozen=True)
class Paths:
    runtime_dir: str = _key("/run/moe-l2", "sockets and locks", check=_check_runtime_dir)
    state_dir: str = _key("/var/lib/moe-l2", "what is kept across restarts", check=_check_needed_path)
    models_dir: str = _key("/var/lib/moe-l2/models", 'where model.path = "auto" looks', check=_check_needed_path)


@dataclass(frozen=True)
class Log:
    level: str = _key("info", "least important messages to log", choices=LEVELS)


@dataclass(frozen=True)
class Config:
    server: Server = field(default_factory=Server)
    control: Control = field(default_factory=Control)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    arena: Arena = field(default_factory=Arena)
    memory: Memory = field(default_factory=Memory)
    paths: Paths = field(default_factory=Paths)
    log: Log = field(default_factory=Log)

    @property
    def runtime_dir(self) -> Path:
        return Path(self.paths.runtime_dir)

    @property
    def control_socket(self) -> Path:
        return Path(self.control.socket) if self.control.socket else self.runtime_dir / "control.sock"

    @property
    def engine_socket(self) -> Path:
        return self.runtime_dir / "engine" / "engine.sock"

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> key -> value, lists as lists: what `config show` prints."""
        shown = dataclasses.asdict(self)
        return {s: {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items()} for s, keys in shown.items()}


@dataclass(frozen=True)
class Installation:
    """Where the program's own parts lie; found by main from configuration and environment."""

    engine_dir: Path
    native_dir: Path


def parse(text: str, base: Config | None = None) -> Config:
    """The Config that TOML `text` describes; keys it lacks are taken from `base` (the defaults).

    Raises ConfigError naming the key, the value and the limit.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read the configuration: not valid TOML, {error}") from None
    base = base or Config()
    sections: dict[str, Any] = {}
    known = {f.name for f in dataclasses.fields(Config)}
    for name, values in tree.items():
        if name not in known:
            what = "section" if isinstance(values, dict) else "key"
            raise ConfigError(f"cannot use {what} '{name}': there is no such {what}, the sections are {_list(known)}")
        if not isinstance(values, dict):
            raise ConfigError(f"cannot use '{name}': it must be a section, write [{name}]")
        sections[name] = _section(name, values, getattr(base, name))
    config = dataclasses.replace(base, **sections)
    _check_together(config)
    return config


def load(path: Path, base: Config | None = None) -> Config:
    """parse() of a file; every error names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration '{path}': not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration '{path}': {_os_cause(error)}") from None
    try:
        return parse(text, base)
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from None


def _section(section: str, values: Mapping[str, object], base: Any) -> Any:
    fields = {f.name: f for f in dataclasses.fields(base)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"cannot use key '{section}.{name}': there is no such key, "
                              f"the keys of [{section}] are {_list(fields)}")
        changes[name] = _value(f"{section}.{name}", value, fields[name])
    return dataclasses.replace(base, **changes)


def _value(key: str, value: Any, spec: dataclasses.Field[Any]) -> Any:
    default, meta = spec.default, spec.metadata
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _refuse(key, value, "it must be a list of strings")
        value = tuple(value)
    elif isinstance(default, bool) or isinstance(value, bool):
        if type(value) is not type(default):
            raise _refuse(key, value, f"it must be {_kind(default)}")
    elif isinstance(default, float) and isinstance(value, int):
        # bound first: an integer of any size need not fit a float
        _check_range(key, value, meta["low"], meta["high"], meta["unit"])
        value = float(value)
    elif type(value) is not type(default):
        raise _refuse(key, value, f"it must be {_kind(default)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(key, value, meta["low"], meta["high"], meta["unit"])
    if isinstance(value, str) and any(ord(c) < 32 for c in value):
        raise _refuse(key, value.encode("unicode_escape").decode(), "it holds control characters")
    if meta["choices"] and value not in meta["choices"]:
        raise _refuse(key, value, f"it must be one of {_list(meta['choices'])}")
    if meta["check"] is not None:
        meta["check"](key, value)
    return value


def _check_range(key: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # also refuses nan
        raise _refuse(key, value, f"it must be from {plain(low)} to {plain(high)} {unit}".rstrip())


def plain(number: float) -> str:
    """1048576, and not 1.04858e+06."""
    return str(int(number)) if number == int(number) else str(number)


def _check_together(config: Config) -> None:
    engine = config.engine
    if not config.server.allow_unauthenticated and not is_loopback(config.server.host_port[0]):
        raise _refuse("server.listen", config.server.listen,
                      "everybody who reaches that address could use the model, there is no authentication yet; "
                      "listen on 127.0.0.1, or set server.allow_unauthenticated = true")
    if engine.restart_backoff_s > engine.restart_backoff_max_s:
        raise _refuse("engine.restart_backoff_s", engine.restart_backoff_s,
                      f"it must not be above engine.restart_backoff_max_s, which is {engine.restart_backoff_max_s:g}")
    total = config.model.context * engine.slots
    if total > 2**31 - 1:
        raise _refuse("model.context", config.model.context,
                      f"times engine.slots ({engine.slots}) it must stay below {2**31} tokens")


def changed_keys(old: Config, new: Config) -> list[str]:
    """The keys, as "section.key", whose values differ."""
    before, after = old.as_dict(), new.as_dict()
    return [f"{s}.{k}" for s, keys in after.items() for k, value in keys.items() if before[s][k] != value]


def _kind(default: object) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return kinds[type(default)]


def _list(names: Any) -> str:
    return ", ".join(sorted(names))


def _os_cause(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
