#!/bin/sh
# Build the engine (cached outside the clone) and, unless called with `engine`, our native part in build/native.
# Leaves build/engine-home, a link to the engine's folder. Says something only when there is something to do or to see.
set -eu
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

home=$(.venv/bin/python native/build_engine.py)
mkdir -p build
ln -sfn "$home" build/engine-home
[ "${1:-}" = engine ] && exit 0

log=build/native.log
quietly() {
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        say "cannot build native/: '$1' failed, its messages are above and in $log"
        exit 1
    fi
}
# The engine's folder is part of the configuration: another engine means configuring again.
if ! grep -qsx "MOE_L2_ENGINE_HOME:[A-Z]*=$home" build/native/CMakeCache.txt || [ ! -e build/native/build.ninja ]; then
    say "configuring native/"
    quietly cmake -S native -B build/native -G Ninja -DMOE_L2_ENGINE_HOME="$home"
fi
quietly ninja -C build/native
grep -q 'no work to do' "$log" || say "built native/ (log: $log)"
