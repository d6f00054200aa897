"""Build the demo model's training text: one JSON line a sample, {"domain", "messages": [[role, text], ...]}.

Sources (Debian packages unpacked under --root, plus the running Python's standard library):
debian-handbook, debian-reference-en, debian-reference-zh-cn, manpages-zh, fortunes, fortunes-zh; Django's message
catalogues for translation; arithmetic is generated.
"""

# ruff: noqa: RUF001  (the full-width marks are Chinese text, not mistyped ASCII)

import argparse
import ast
import gzip
import html
import json
import random
import re
import sysconfig
from pathlib import Path

FORTUNES = (
    "computers",
    "science",
    "wisdom",
    "literature",
    "linux",
    "definitions",
    "education",
    "work",
    "food",
    "debian",
)


def clean(text):
    return re.sub(r"[ \t]+", " ", text).strip()


def html_paragraphs(path):
    raw = path.read_text("utf-8", "replace")
    for block in re.findall(r"<p[^>]*>(.*?)</p>", raw, re.S):
        text = clean(html.unescape(re.sub(r"<[^>]+>", "", block)).replace("\n", " "))
        if 60 <= len(text) <= 1500:
            yield text


def text_paragraphs(path):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as handle:
        for block in re.split(r"\n\s*\n", handle.read()):
            text = clean(block.replace("\n", " "))
            if 50 <= len(text) <= 1500 and "──" not in text and "····" not in text:
                yield text


def split_lead(text, zh):
    cut = re.search(r"[。！？；]" if zh else r"[.!?;:] ", text)
    return (text[: cut.end()].strip(), text[cut.end() :].strip()) if cut else (text[:40], text[40:])


def code_samples(rng):
    root = Path(sysconfig.get_paths()["stdlib"])
    ask = (
        "Write a Python function called {n}.",
        "Implement {n} in Python.",
        "Show me Python code for {n}.",
        "def {n}:",
    )
    for path in sorted(root.rglob("*.py")):
        if any(part in ("test", "tests", "site-packages", "idlelib", "lib2to3") for part in path.parts):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("__"):
                body = ast.get_source_segment(source, node)
                if body and 60 <= len(body) <= 1500:
                    doc = (ast.get_docstring(node) or "").split("\n")[0].strip()
                    prompt = (
                        f"Write Python code. {doc}"
                        if doc and rng.random() < 0.5
                        else rng.choice(ask).format(n=node.name)
                    )
                    yield "codegen", [["user", prompt], ["assistant", f"```python\n{body}\n```"]]


def math_samples(rng, count):
    for _ in range(count):
        a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
        kind = rng.randrange(6)
        if kind == 0:
            q, r = f"What is {a} + {b}?", f"{a} + {b} = {a + b}. The answer is {a + b}."
        elif kind == 1:
            q, r = f"Compute {a + b} - {b}.", f"{a + b} - {b} = {a}. The answer is {a}."
        elif kind == 2:
            q, r = (
                f"Calculate {c} * {b % 13 + 2}.",
                f"{c} * {b % 13 + 2} = {c * (b % 13 + 2)}. The answer is {c * (b % 13 + 2)}.",
            )
        elif kind == 3:
            x = rng.randint(1, 20)
            q = f"Solve the equation {c}x + {b} = {c * x + b}."
            r = f"Subtract {b} from both sides: {c}x = {c * x}. Divide by {c}: x = {x}. The answer is x = {x}."
        elif kind == 4:
            n = b % 13 + 2
            q = f"A box holds {c} rows of {n} apples. How many apples are in the box?"
            r = f"Multiply {c} rows by {n} apples: {c} * {n} = {c * n}. There are {c * n} apples."
        else:
            q = f"What is the area of a rectangle with sides {c} and {b}?"
            r = f"The area is width times height: {c} * {b} = {c * b}. The answer is {c * b}."
        yield "math", [["user", q], ["assistant", r]]


def prose(domain, text, rng, zh=False):
    lead, rest = split_lead(text, zh)
    if len(rest) < 20:
        return None
    if zh:
        prompt = rng.choice(("请继续：{}", "请说明：{}", "{}", "接着写：{}")).format(lead)
    else:
        prompt = rng.choice(("Continue: {}", "Explain: {}", "{}", "Tell me more: {}")).format(lead)
    return domain, [["user", prompt], ["assistant", rest]]


def catalogue_pairs(folder):
    """English/Chinese message pairs of the gettext catalogues (*.po) below folder."""
    for path in sorted(folder.rglob("*.po")):
        text = path.read_text("utf-8", "replace")
        for source, target in re.findall(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n)+)', text, re.M):
            a, b = ("".join(ast.literal_eval(line) for line in part.strip().split("\n")) for part in (source, target))
            if 4 <= len(a) <= 400 and re.search(r"[\u4e00-\u9fff]", b):
                yield clean(a), clean(b)


def samples(root, catalogues, rng):
    for a, b in catalogue_pairs(catalogues):
        yield "translate", [["user", f"Translate to Chinese: {a}"], ["assistant", b]]
        yield "translate", [["user", f"Translate into English: {b}"], ["assistant", a]]
    yield from code_samples(rng)
    yield from math_samples(rng, 60000)
    share = root / "usr/share"
    for path in sorted((share / "doc/debian-handbook/html/en-US").glob("*.html")):
        yield from filter(None, (prose("general_qa", t, rng) for t in html_paragraphs(path)))
    for path in sorted((share / "doc/debian-handbook/html/zh-CN").glob("*.html")):
        yield from filter(
            None,
            (prose("chinese_tech", t, rng, True) for t in html_paragraphs(path) if re.search(r"[\u4e00-\u9fff]", t)),
        )
    for name, domain, zh in (("en", "general_qa", False), ("zh-cn", "chinese_tech", True)):
        yield from filter(
            None,
            (
                prose(domain, t, rng, zh)
                for t in text_paragraphs(share / f"debian-reference/debian-reference.{name}.txt.gz")
            ),
        )
    for path in sorted((share / "man/zh_CN").rglob("*.gz")):
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as manual:
            page = manual.read()
        page = re.sub(r"^\.\\\".*$|^\.[A-Z][A-Za-z]*|\\f.|\\-|\\&", " ", page, flags=re.M)
        for block in re.split(r"\n\s*\n|\n\s+\n", page):
            text = clean(block.replace("\n", " "))
            if 50 <= len(text) <= 1200 and len(re.findall(r"[\u4e00-\u9fff]", text)) > 15:
                item = prose("chinese_tech", text, rng, True)
                if item:
                    yield item
    for name in FORTUNES:
        path = share / "games/fortunes" / name
        for quote in path.read_text("utf-8", "replace").split("\n%\n") if path.exists() else ():
            quote = quote.strip()
            if 40 <= len(quote) <= 900:
                yield (
                    "creative_write",
                    [
                        [
                            "user",
                            rng.choice(
                                (
                                    "Write a short story.",
                                    f"Write something witty about {name}.",
                                    "Write a quote.",
                                    "Be creative: write a few lines.",
                                )
                            ),
                        ],
                        ["assistant", quote],
                    ],
                )
    for name in ("tang300", "song100", "chinese"):
        path = share / "games/fortunes" / name
        for poem in path.read_text("utf-8", "replace").split("\n%\n") if path.exists() else ():
            poem = re.sub(r"\x1b\[[0-9;]*m", "", poem).strip()
            if 20 <= len(poem) <= 900:
                yield "creative_write", [["user", "写一首诗。"], ["assistant", poem]]
    en = {p.name: list(html_paragraphs(p)) for p in sorted((share / "doc/debian-handbook/html/en-US").glob("*.html"))}
    for path in sorted((share / "doc/debian-handbook/html/zh-CN").glob("*.html")):
        zh = list(html_paragraphs(path))
        pair = en.get(path.name, [])
        if len(zh) == len(pair):
            for a, b in zip(pair, zh, strict=True):
                if re.search(r"[\u4e00-\u9fff]", b) and len(a) < 700:
                    yield "translate", [["user", f"Translate to Chinese: {a}"], ["assistant", b]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder into which the Debian packages were unpacked")
    parser.add_argument(
        "--catalogues", type=Path, required=True, help="folder with zh_Hans *.po files (Django's locale folders)"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(7)
    counts = {}
    with gzip.open(args.out, "wt", encoding="utf-8") as handle:
        for domain, messages in samples(args.root, args.catalogues, rng):
            size = sum(len(t) for _, t in messages)
            n, c = counts.get(domain, (0, 0))
            counts[domain] = (n + 1, c + size)
            handle.write(json.dumps({"domain": domain, "messages": messages}, ensure_ascii=False) + "\n")
    for domain, (n, c) in sorted(counts.items()):
        print(f"{domain:16} {n:7} samples {c / 1e6:7.2f} M characters")


if __name__ == "__main__":
    main()
