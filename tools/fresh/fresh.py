#!/usr/bin/env python3
"""`make test-fresh`: prove that `make demo` and `make test` work on a fresh Debian 12 and a fresh Debian 13.

For each release: a root with only ca-certificates, git, make and sudo (made by mmdebstrap), in it a user who may use
sudo, a clone of this repository, and the two commands of the README. Needs root; not part of `make test`, since the
engine is built from nothing in each root. Options go through make: make test-fresh FRESH="--release trixie --only demo"
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RELEASES = ("bookworm", "trixie")
PACKAGES = ("ca-certificates", "git", "make", "sudo")
TARGETS = ("demo", "test")
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
NEEDED_GIB = 12  # a root with the compiler, the engine's source and its build
STEP_LIMIT_S = 3600

# How this machine reaches its package registries goes into the root: these variables and these settings of apt.
CARRIED_VARIABLES = re.compile(
    r"PIP_\w+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(https?|no)_proxy", re.IGNORECASE
)
CARRIED_APT = re.compile(r"Acquire::(http|https|ftp|Check|Retries|Languages)[^ ]* ")


class FreshError(Exception):
    """Why the proof cannot be made; the text says what and what to do."""


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def timed(name: str, step: Callable[[], None]) -> float:
    """Run one step and say how long it took."""
    say(f"{name} ...")
    started = time.monotonic()
    step()
    elapsed = time.monotonic() - started
    say(f"{name}: done in {elapsed:.0f} s")
    return elapsed


def run(command: Iterable[object], **options: object) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, **options).returncode != 0:  # type: ignore[call-overload]
        raise FreshError(f"cannot go on: '{shlex.join(words)[:200]}' failed, its messages are above")


def apt_sources() -> list[tuple[str, str]]:
    """This machine's (URI, suite) pairs, of deb lines and of deb822 files."""
    found = []
    etc = Path("/etc/apt")
    for path in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))]:
        for line in path.read_text().splitlines() if path.exists() else ():
            if match := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", line):
                found.append((match[1], match[2]))
    for path in sorted(etc.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            keys = dict(re.findall(r"^(\w[\w-]*):[ \t]*(.*)$", stanza, re.MULTILINE))
            if "deb" in keys.get("Types", "").split() and keys.get("Enabled", "yes") != "no":
                found += [(uri, suite) for uri in keys["URIs"].split() for suite in keys["Suites"].split()]
    return found


def sources_for(release: str, known: list[tuple[str, str]]) -> str:
    """The deb lines of `release` at the mirrors that this machine uses for its own release."""
    main = next((uri for uri, suite in known if re.fullmatch(r"[a-z]+", suite)), None)
    security = next((uri for uri, suite in known if suite.endswith("-security")), None)
    if main is None:
        raise FreshError("cannot find a Debian mirror: /etc/apt names none")
    lines = [f"deb {main} {release} main", f"deb {main} {release}-updates main"]
    if security:
        lines.append(f"deb {security} {release}-security main")
    return "\n".join(lines) + "\n"


def apt_options() -> list[str]:
    dump = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    return [line for line in dump.splitlines() if CARRIED_APT.match(line) and not line.endswith('"";')]


def environment_text(environment: Mapping[str, str]) -> str:
    """The carried variables as shell text. One that names a path which only this machine has would only confuse."""
    lines = []
    for name, value in sorted(environment.items()):
        local = value.startswith("/") and not value.startswith(str(CA_BUNDLE.parent))
        if CARRIED_VARIABLES.fullmatch(name) and not local:
            lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join(lines) + "\n"


def install_mmdebstrap() -> None:
    if shutil.which("mmdebstrap") is None:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], env=environment)
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", "mmdebstrap"], env=environment)


def make_root(release: str, root: Path) -> None:
    """A minimal root of the release, with a user 'person' (1000) who may use sudo without a password."""
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    command += [f"--aptopt={option}" for option in apt_options()]
    run([*command, release, root, "-"], input=sources_for(release, apt_sources()), text=True)
    run(["chroot", root, "useradd", "--create-home", "--uid", "1000", "--shell", "/bin/bash", "person"])
    (root / "etc/sudoers.d/person").write_text("person ALL=(ALL) NOPASSWD: ALL\n")
    (root / "etc/gitconfig").write_text("[safe]\n\tdirectory = *\n")  # the repository belongs to somebody else
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    (root / "etc/hosts").write_text("127.0.0.1 localhost fresh\n")
    if CA_BUNDLE.exists():
        shutil.copyfile(CA_BUNDLE, root / CA_BUNDLE.relative_to("/"))


def in_root(work: Path, source: Path, cache: Path | None, command: str) -> None:
    """Run `command` as the user of the root, in namespaces of its own; whatever it starts ends with it."""
    (work / "environment").write_text(environment_text(os.environ))
    unshare = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--propagation", "private"]
    words = [*unshare, HERE / "inside.sh", work / "root", source, cache or "", work / "environment", command]
    run(words, stdin=subprocess.DEVNULL, timeout=STEP_LIMIT_S)


def snapshot(work: Path) -> Path:
    """A repository of one commit: the working tree as it is, files that git does not know yet included."""
    copy = work / "snapshot"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (REPOSITORY / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name, follow_symlinks=False)
    run(["git", "init", "--quiet", copy])
    run(["git", "-C", copy, "add", "--all", "--force"])
    identity = ["-c", "user.name=fresh", "-c", "user.email=fresh@localhost"]
    run(["git", "-C", copy, *identity, "commit", "--quiet", "-m", "the working tree"])
    return copy


def warn_of_uncommitted() -> None:
    status = ["git", "-C", str(REPOSITORY), "status", "--porcelain"]
    if subprocess.run(status, check=True, capture_output=True, text=True).stdout:
        say("note: the working tree has changes that are not committed; they are not tested (--uncommitted does)")


def remove(work: Path) -> None:
    """Delete the folder, but never through something that is still mounted in it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if left := [mount for mount in mounts if mount.startswith(f"{work}/")]:
        raise FreshError(f"cannot delete '{work}': still mounted are {', '.join(left)}")
    run(["rm", "-rf", "--one-file-system", work])


def prove(release: str, args: argparse.Namespace) -> dict[str, float]:
    """All steps for one release; the elapsed seconds of each."""
    work = Path(tempfile.mkdtemp(prefix=f"moe-l2-fresh-{release}-", dir="/var/tmp"))
    if work.is_relative_to(REPOSITORY):
        raise FreshError(f"cannot work in '{work}': it is inside the repository, which would be copied into itself")
    times = {}
    try:
        times["root"] = timed(f"{release}: make a clean root", lambda: make_root(release, work / "root"))
        source = snapshot(work) if args.uncommitted else REPOSITORY
        clone = "git clone --quiet /mnt/source moe-l2"
        times["clone"] = timed(f"{release}: {clone}", lambda: in_root(work, source, args.cache, clone))
        for target in TARGETS:
            if args.only in (None, target):
                cache = "export MOE_L2_CACHE=/mnt/cache; " if args.cache else ""
                command = f"{cache}cd moe-l2 && {args.command or f'make {target}'}"
                name = f"{release}: {args.command or f'make {target}'}"
                times[target] = timed(name, partial(in_root, work, source, args.cache, command))
    finally:
        if args.keep:
            say(f"{release}: kept {work}")
        else:
            remove(work)
    return times


def check_machine(args: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise FreshError("cannot make a root: not root; run 'sudo make test-fresh'")
    free = shutil.disk_usage("/var/tmp").free >> 30
    if free < NEEDED_GIB:
        raise FreshError(f"cannot make a root: /var/tmp has {free} GiB free, {NEEDED_GIB} are needed")
    if args.cache and not args.cache.is_dir():
        raise FreshError(f"cannot use cache '{args.cache}': no such folder")
    install_mmdebstrap()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", choices=RELEASES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--only", choices=TARGETS, help="only this command")
    parser.add_argument("--keep", action="store_true", help="leave the root in /var/tmp to look into")
    parser.add_argument("--cache", type=Path, help="start from this engine cache (it is not changed); default: none")
    parser.add_argument("--uncommitted", action="store_true", help="clone the working tree as it is, not its commits")
    parser.add_argument("--command", help="run this in the clone in place of 'make TARGET'")
    args = parser.parse_args(argv)
    args.cache = args.cache.resolve() if args.cache else None
    return args


def interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, interrupt)  # clean up then, too
    signal.signal(signal.SIGINT, interrupt)  # a background job would ignore it, and so would the tests in the root
    try:
        check_machine(args)
        if not args.uncommitted:
            warn_of_uncommitted()
        results = {release: prove(release, args) for release in args.release or RELEASES}
    except (FreshError, subprocess.TimeoutExpired) as error:
        print(f"fresh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fresh: interrupted, cleaned up", file=sys.stderr)
        return 130
    for release, times in results.items():
        say(f"{release}: " + ", ".join(f"{step} {seconds:.0f} s" for step, seconds in times.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
