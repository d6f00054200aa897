#!/bin/sh
# Prepare this clone: system packages that are missing, and the virtual environment .venv with the project in it.
# POSIX sh, because a fresh machine may have neither bash's features to rely on nor Python.
# `tools/setup.sh test` also installs what only the tests need. Nothing is done, and nothing said, when all is there.
set -eu
cd "$(dirname "$0")/.."
purpose=${1:-run}

say() { printf '%s\n' "$*" >&2; }

# A Python that is new enough and can make virtual environments. A Python of the user's own (pyenv) comes first on the PATH.
find_python() {
    for candidate in python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

have() { command -v "$1" >/dev/null 2>&1; }

missing_packages() {
    [ -n "$(find_python)" ] || echo python3 python3-venv
    have c++ || echo g++
    have cmake || echo cmake
    have ninja || echo ninja-build
    have patch || echo patch
    if [ "$purpose" = test ]; then
        have systemd-analyze || echo systemd # the unit files are checked with it
        have kill && [ -x /bin/kill ] || echo procps # the unit's ExecReload
    fi
}

install_packages() {
    if ! have apt-get; then
        say "cannot install system packages: this is not Debian or Ubuntu (no apt-get)"
        say "install these, or what your system calls them, and try again: $*"
        exit 1
    fi
    sudo=
    if [ "$(id -u)" != 0 ]; then
        have sudo || { say "cannot install system packages: not root, and no sudo; run 'apt-get install $*' as root"; exit 1; }
        sudo=sudo
    fi
    say "installing system packages: $* (one or two minutes)"
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get update -q </dev/null >&2
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" </dev/null >&2
}

make_environment() {
    # The stamp names all that the environment is made from, so that a change of it is noticed and a second run is quick.
    stamp=.venv/.made-from-$(sha256sum pyproject.toml | cut -c1-16)
    [ -e "$stamp" ] && [ -x .venv/bin/python ] && return
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        python=$(find_python)
        [ -n "$python" ] || { say "cannot make .venv: no Python 3.11 or newer was found; Debian 12 and later have one"; exit 1; }
        say "making the virtual environment .venv with $python"
        "$python" -m venv --clear .venv
    fi
    say "installing the project and what it needs into .venv (about a minute)"
    quiet=--quiet
    [ -t 2 ] && quiet= # on a terminal pip shows its progress
    .venv/bin/python -m pip install $quiet --disable-pip-version-check -e '.[test]' >&2
    rm -f .venv/.made-from-*
    : >"$stamp"
}

packages=$(missing_packages | tr '\n' ' ')
# shellcheck disable=SC2086  # a list of words
[ -z "$packages" ] || install_packages $packages
make_environment
