#!/usr/bin/env python3
"""Fetch, check, patch and build the pinned llama.cpp; print where the engine's programs are.

The result is kept outside the clone, in a folder named by a hash of everything it is made from
(source hash, patches, CMake options, compiler), so that a second clone, or CI, builds nothing.
Standard library only: this runs before the virtual environment exists, and later from the package.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGETS = ("llama-server", "llama-bench", "llama-perplexity")
BUILD_MINUTES_ON_TWO_CORES = 10  # measured on the development machine; only used for the first estimate

# cpuinfo flags that must all be there -> the ggml option they switch on.
# (GGML_NATIVE cannot be combined with GGML_BACKEND_DL, so the choice is made here.)
# AMX is left out: g++ 12 drops the stores to the tile configuration before ldtilecfg (its _tile_loadconfig names only
# the first 8 of the 64 bytes as read), and the first prompt dies of an illegal instruction.
X86_OPTIONS: dict[str, tuple[str, ...]] = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_F16C": ("f16c",),
    "GGML_FMA": ("fma",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX2": ("avx2",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
    "GGML_AVX512_BF16": ("avx512_bf16",),
}


class BuildError(Exception):
    """Something the person at the keyboard must know; the text says what and what to do."""


def read_pin(path: Path) -> dict[str, str]:
    """`native/LLAMA_CPP` as a dict with the keys tag, package, archive and sha256."""
    pin = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            pin[key.strip()] = value.strip()
    return pin


def cpu_options(flags: set[str]) -> dict[str, str]:
    """CMake options for a CPU whose /proc/cpuinfo lists `flags`."""
    return {name: "ON" if flags.issuperset(needed) else "OFF" for name, needed in X86_OPTIONS.items()}


def cpu_flags() -> set[str]:
    match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def cmake_options(flags: set[str], tag: str) -> dict[str, str]:
    return {
        "LLAMA_BUILD_NUMBER": tag.removeprefix("b"),
        "LLAMA_BUILD_COMMIT": tag,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": "$ORIGIN",
        "BUILD_SHARED_LIBS": "ON",
        "GGML_BACKEND_DL": "ON",
        "GGML_NATIVE": "OFF",
        "GGML_CCACHE": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_IS_DEV": "OFF",
        **cpu_options(flags),
    }


def compiler_version() -> str:
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        raise BuildError(f"cannot build the engine: no C++ compiler '{cxx}' on the PATH; run 'apt-get install g++'")
    return subprocess.run([cxx, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]


def build_key(pin: Mapping[str, str], patches: list[Path], options: Mapping[str, str], compiler: str) -> str:
    """A short hash of all that the engine is made from."""
    digest = hashlib.sha256()
    for part in (pin["sha256"], compiler, *TARGETS, *(f"{k}={v}" for k, v in sorted(options.items()))):
        digest.update(part.encode() + b"\0")
    for patch in patches:
        digest.update(patch.read_bytes())
    return digest.hexdigest()[:12]


def cache_root() -> Path:
    if chosen := os.environ.get("MOE_L2_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-l2"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock: two builds of the same engine wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build that holds {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fetch(pin: Mapping[str, str], downloads: Path) -> Path:
    """The source archive, downloaded with pip and checked against the pinned SHA-256."""
    archive = downloads / pin["archive"]
    if not (archive.exists() and sha256_of(archive) == pin["sha256"]):
        say(f"downloading {pin['package']} (36 MB)")
        downloads.mkdir(parents=True, exist_ok=True)
        package = pin["package"].partition("==")[0]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
        if subprocess.run([*command, "--dest", str(downloads), pin["package"]]).returncode != 0:
            raise BuildError(f"cannot download '{pin['package']}': pip failed, its message is above")
    found = sha256_of(archive)
    if found != pin["sha256"]:
        archive.unlink()
        raise BuildError(f"cannot use '{archive.name}': its SHA-256 is {found}, native/LLAMA_CPP says {pin['sha256']}")
    return archive


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, patches: list[Path], source: Path) -> None:
    """Unpack `llama.cpp/` of the archive to `source` and apply the patches; all or nothing.

    By the `tar` program: Python 3.11.2 of Debian 12 has no extraction filters.
    """
    partial = source.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tree = f"{archive.name.removesuffix('.tar.gz')}/llama.cpp"
    unwanted = [f"--exclude={tree}/{folder}" for folder in ("models", "media")]
    command = ["tar", "-xzf", str(archive), "-C", str(partial), "--no-same-owner", "--strip-components=2", "--anchored"]
    if subprocess.run([*command, *unwanted, tree]).returncode != 0:
        raise BuildError(f"cannot unpack '{archive}': tar failed, its message is above")
    for patch in patches:
        subprocess.run(["patch", "-p1", "--quiet", "-d", str(partial), "-i", str(patch)], check=True)
    partial.rename(source)


def compile_engine(source: Path, build: Path, options: Mapping[str, str], jobs: int) -> None:
    """Configure and build; shows progress and an estimate on standard error."""
    log_path = build.parent / "build.log"
    with log_path.open("w") as log:
        configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(build)]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        say(f"configuring llama.cpp (log: {log_path})")
        if subprocess.run(configure, stdout=log, stderr=log).returncode != 0:
            raise BuildError(f"cannot configure llama.cpp: cmake failed, see {log_path}")
        command = ["ninja", "-C", str(build), "-j", str(jobs), *TARGETS]
        env = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env, text=True) as ninja:
            assert ninja.stdout is not None
            show_progress(ninja.stdout, log, jobs)
        if ninja.returncode != 0:
            raise BuildError(f"cannot build llama.cpp: ninja failed, see {log_path}")


def show_progress(lines: Iterator[str] | object, log: object, jobs: int) -> None:
    """Turn ninja's '[done/total]' into one line that is rewritten on a terminal, or one line a minute elsewhere."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    last = -60.0
    for line in lines:  # type: ignore[attr-defined]
        log.write(line)  # type: ignore[attr-defined]
        match = re.match(r"\[(\d+)/(\d+)\]", line)
        if not match:
            continue
        done, total = int(match[1]), int(match[2])
        elapsed = time.monotonic() - started
        if elapsed - last < (0.5 if terminal else 60) and done != total:
            continue
        last = elapsed
        left = elapsed / done * (total - done) if done > 20 else BUILD_MINUTES_ON_TWO_CORES * 60 * 2 / jobs
        text = f"building the engine: {done}/{total} files, {elapsed:.0f} s, about {left / 60:.0f} min left"
        print(f"\r{text}\x1b[K" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
    if terminal:
        print(file=sys.stderr)


def ensure_engine(jobs: int) -> Path:
    """Build the engine unless the cache has it; the folder returned holds src/ and build/bin/."""
    pin = read_pin(HERE / "LLAMA_CPP")
    patches = sorted((HERE / "patches").glob("*.patch"))
    options = cmake_options(cpu_flags(), pin["tag"])
    home = cache_root() / f"engine-{pin['tag']}-{build_key(pin, patches, options, compiler_version())}"
    done = home / "complete"
    if done.exists():
        return home
    with locked(home.with_suffix(".lock")):
        if done.exists():
            return home
        home.mkdir(parents=True, exist_ok=True)
        say(f"the engine is built once, about {BUILD_MINUTES_ON_TWO_CORES * 2 / jobs:.0f} minutes on {jobs} cores")
        if not (home / "src").exists():
            unpack(fetch(pin, cache_root() / "downloads"), patches, home / "src")
        compile_engine(home / "src", home / "build", options, jobs)
        done.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    return home


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once (default: all cores)"
    )
    args = parser.parse_args()
    try:
        print(ensure_engine(args.jobs))
    except BuildError as error:
        say(f"build_engine: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
