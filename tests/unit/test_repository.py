"""Checks in place of reminders: what must stay in step within this repository."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = {".py": 400, ".c": 500, ".cpp": 500, ".h": 500, ".cu": 500}
CODE_ROOMS = ("moe_l2d", "moe_l2ctl", "native", "tests", "tools")
TOOL_MAY_IMPORT = {"moe_l2d", "moe_l2d.api", "moe_l2d.errors"}
# `config check` judges a file without a daemon.
ALSO_MAY_IMPORT = {"moe_l2ctl/commands/config.py": {"moe_l2d.config"}}
HEAVY = {"aiohttp", "numpy", "uvloop", "gguf", "psutil", "prometheus_client"}
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in LINES_MAX)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, everywhere: bool) -> set[str]:
    """Names of modules that the file imports: all, or only at its top level (type checking blocks left out)."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def modules(room: str) -> dict[str, Path]:
    return {module_name(path): path for path in (ROOT / room).rglob("*.py")}


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of the graph as the list of its nodes, or an empty list."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph[node]):
            if circle := walk(following, [*trail, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(graph) if (circle := walk(node, []))), [])


def version_of_project() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_real_make_targets(document: str) -> None:
    """Every `make TARGET` in the documents is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=`| +#|$)", (ROOT / document).read_text(), re.MULTILINE))
    assert named <= targets, named - targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_link_to_what_exists(document: str) -> None:
    """Every relative link in the documents leads to a file of the repository."""
    path = ROOT / document
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_phony_targets_are_declared() -> None:
    """Every target of the Makefile is in .PHONY, so that a file of that name cannot hide it."""
    text = (ROOT / "Makefile").read_text()
    phony = set(" ".join(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)).split())
    assert set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE)) <= phony


def test_files_are_small() -> None:
    """No Python file has more than 400 lines, no C or C++ file more than 500."""
    sizes = {path: len(path.read_text().splitlines()) for path in sources(*CODE_ROOMS)}
    too_long = {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > LINES_MAX[p.suffix]}
    assert too_long == {}


def test_documents_name_the_pinned_engine() -> None:
    """A llama.cpp tag (bNNNNN) named in any document is the one that native/LLAMA_CPP pins."""
    pin = re.search(r"^tag\s*=\s*(\S+)$", (ROOT / "native/LLAMA_CPP").read_text(), re.MULTILINE)
    assert pin
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("native/*.md")]:
        if path.name != "CHANGELOG.md":  # tells of the past
            assert set(re.findall(r"\bb\d{5}\b", path.read_text())) <= {pin[1]}, path


def test_the_tool_knows_only_the_api_and_the_errors() -> None:
    """moe_l2ctl imports nothing of moe_l2d but the API table and the errors, and no heavy library."""
    for path in modules("moe_l2ctl").values():
        names = imported(path, everywhere=True)
        allowed = TOOL_MAY_IMPORT | ALSO_MAY_IMPORT.get(str(path.relative_to(ROOT)), set())
        of_daemon = {name for name in names if name in modules("moe_l2d")}
        assert of_daemon - allowed == set(), path
        assert not {name.split(".")[0] for name in names} & HEAVY, path


def test_no_circular_imports() -> None:
    """No module of moe_l2d imports itself by way of others."""
    known = modules("moe_l2d")
    graph = {name: (imported(path, everywhere=False) & set(known)) - {name} for name, path in known.items()}
    # `from package import module` also names the package; a package whose __init__ imports nothing closes no circle.
    assert find_circle(graph) == []


def test_a_circle_would_be_found() -> None:
    """The search above does find a circle."""
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_one_version_everywhere() -> None:
    """pyproject.toml and moe_l2d.__version__ agree, and the CHANGELOG has that version or an Unreleased part."""
    import moe_l2d

    assert moe_l2d.__version__ == version_of_project()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[([^]]+)\]", changelog, re.MULTILINE)
    assert headings, "CHANGELOG.md has no version"
    assert headings[0] in ("Unreleased", version_of_project())


def test_no_registry_host_is_named() -> None:
    """Packages come from wherever this machine's own settings say: no file of ours names a package host."""
    hosts = re.compile(r"(pypi\.org|pythonhosted|deb\.debian\.org|index-url)")
    ours = [
        ROOT / "Makefile",
        *(ROOT / "tools").rglob("*.sh"),
        *(ROOT / "tools").rglob("*.py"),
        ROOT / "native/build_engine.py",
    ]
    assert [str(path) for path in ours if hosts.search(path.read_text())] == []
