"""The arguments of llama-server that moe-l2d sets itself, or that would undo what it relies on.

A second listener, another model or another way of loading would go round the daemon, so engine.extra_args
may not hold any of these. llama-server reads "--a_b" as "--a-b".
"""

from __future__ import annotations

_MODEL = "-m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -a --alias"
_LOADING = """
    -lm --load-mode --mmap --no-mmap --mlock -dio --direct-io -ndio --no-direct-io -fit --fit -nr --repack --no-repack
    -ot --override-tensor --warmup --no-warmup
"""
_CAPACITY = "-np --parallel -c --ctx-size -t --threads"  # the queue is built on it
_LISTENER = """
    --host --port --reuse-port --api-key --api-key-file --ssl-key-file --ssl-cert-file --api-prefix --jinja --no-jinja
    --metrics --slots --no-slots --ui --no-ui --webui --no-webui --models-dir --models-preset --models-max
    --embedding --embeddings --pooling --sleep-idle-seconds --log-file --log-disable
"""
OWNED = frozenset(f"{_MODEL} {_LOADING} {_CAPACITY} {_LISTENER}".split())


def is_owned(argument: str) -> bool:
    """Is `argument` (perhaps "--flag=value") one of OWNED?"""
    flag = argument.partition("=")[0]
    return (flag.replace("_", "-") if flag.startswith("--") else flag) in OWNED
