"""Count the vocabulary of the code and the pages: home-made words and the standard terms.

    python docs/words.py              prints the table for this working tree
    python docs/words.py --root DIR   prints it for another checkout
    python docs/words.py --find place lists every hit of a banned word

Counts cover four kinds of text of the product (tests excluded): identifiers, docstrings and
comments, messages (string literals with a space), and pages (README.md, docs/*.md and the comments
of configs/). Code blocks and inline code of pages do not count.

``BANNED`` lists the words that may not occur at all, in any kind of text. Phrases in ``ALLOWED``
and identifiers in ``ALLOWED_NAMES`` are exempt: they use a banned word in its ordinary sense.
"""

from __future__ import annotations

import argparse
import ast
import io
import keyword
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KINDS = ("identifiers", "prose", "messages", "pages")

# word -> its forms, as whole words of prose and as parts of identifiers
BANNED = {
    "place": ("place", "places"),
    "law": ("law", "laws"),
    "fulfilled": ("fulfil", "fulfils", "fulfill", "fulfills", "fulfilled"),
    "picture": ("picture", "pictures"),
    "knob": ("knob", "knobs"),
}
ALLOWED = (  # removed from prose before it is searched
    r"in[- ]place",
    r"in (its|their|the) places?",
    r"(take|takes|taking|took|taken) (the )?place",
    r"decimal places?",
    r"first place",
    r"power laws?",
    r"one picture is worth",
)
ALLOWED_NAMES = ("in_place", "inplace")

# other words of the table: whole identifiers, and words of prose
HOME = {
    "id(s)": (("id", "ids"), r"ids?"),
    "row(s)": (("row", "rows"), r"rows?"),
    "forward call(s)": ((), r"forward[- ]calls?"),
    "medium": (("medium",), r"medium"),
    "draws": (("draws", "purpose"), r"draws"),
    "now": (("now",), None),
    "here": (("here", "sent"), None),
    "anywhere": (("anywhere",), r"anywhere"),
    "kept": (("kept",), r"kept"),
    "at, of": (("at", "of"), None),
    "told, Book, Seats": (("_told", "_Book", "Seats"), None),
    "keep, renew": (("keep", "renew"), r"renew\w*"),
    "instead, redrawn": (("instead", "redrawn"), r"redrawn"),
    "leading": (("leading",), None),
    "onward": (("onward", "going_on"), r"onward"),
    "halves": (("half", "halves"), r"halves|halfs?"),
    "empty, filled": ((), r"empty|empties|emptied|filled"),
    "end_id, mask_id": (("end_id", "mask_id"), r"end_id|mask_id"),
    "given": (("given",), r"given"),
    "said, own, ...": (("said", "told", "wanted", "own", "found", "last"), r"said|told|wanted"),
    "whoever, nobody": ((), r"whoever|nobody|somebody"),
}
STANDARD = {
    "position(s)": (("position", "positions"), r"positions?"),
    "token(s)": (("token", "tokens"), r"tokens?"),
    "forward pass(es)": ((), r"forward[- ]pass(?:es)?"),
    "image(s)": (("image", "images"), r"images?"),
    "logprobs": (("logprobs",), r"logprobs|log-probabilities"),
    "distribution": (("distribution",), r"distributions?"),
    "sampling params": (("sampling", "SamplingParams"), r"sampling parameters?"),
    "parameter(s)": (("params", "parameters"), r"parameters?"),
    "CFG": ((), r"classifier-free|CFG"),
    "acceptance rate": ((), r"acceptance rates?"),
    "bonus token": ((), r"bonus tokens?"),
    "prefill": ((), r"prefill\w*"),
    "KV cache": ((), r"KV[- ]caches?"),
    "rejection sampling": ((), r"rejection sampling"),
    "remask(ed)": ((), r"remask\w*"),
}
OPENERS = ("What", "Whether", "Those", "How", "That", "Which", "One", "As", "Who", "Where")


class Text(NamedTuple):
    """Piece of text: its kind (one of ``KINDS``), path, line and words."""

    kind: str
    path: str
    line: int
    text: str


def product_files(root: Path) -> list[Path]:
    """Return the tracked files of the product, without tests, links and this list of words."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    files = [root / name for name in listed if name and not name.startswith("tests/")]
    skipped = root / "docs" / "words.py"
    return [f for f in files if f.is_file() and not f.is_symlink() and f != skipped]


def python_texts(path: str, source: str) -> Iterator[Text]:
    """Yield identifiers, docstrings, comments and messages of a Python file."""
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.add(value)
                yield Text("prose", path, value.lineno, value.value)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in docstrings and " " in node.value.strip():
            yield Text("messages", path, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield Text("identifiers", path, token.start[0], token.string)
        elif token.type == tokenize.COMMENT:
            yield Text("prose", path, token.start[0], token.string)


def page_texts(path: str, source: str) -> Iterator[Text]:
    """Yield the prose of a Markdown page, line by line, without code."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield Text("pages", path, number, re.sub(r"`[^`]*`", "", line))


def config_texts(path: str, source: str) -> Iterator[Text]:
    """Yield the comments of a YAML file."""
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield Text("pages", path, number, line.partition("#")[2])


def texts_of(root: Path) -> Iterator[Text]:
    """Yield every text of the product under ``root``."""
    for file in product_files(root):
        name = file.relative_to(root).as_posix()
        if file.suffix == ".py":
            yield from python_texts(name, file.read_text("utf-8"))
        elif name == "README.md" or (name.startswith("docs/") and file.suffix == ".md"):
            yield from page_texts(name, file.read_text("utf-8"))
        elif name.startswith("configs/") and file.suffix == ".yaml":
            yield from config_texts(name, file.read_text("utf-8"))


def name_parts(name: str) -> list[str]:
    """Split an identifier at underscores and capitals, in lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def banned_count(word: str, text: Text) -> int:
    """Count a banned word in one text, exempt phrases removed."""
    forms = BANNED[word]
    lower = text.text.lower()
    if not any(form in lower for form in forms):
        return 0
    if text.kind == "identifiers":
        if text.text in ALLOWED_NAMES:
            return 0
        return sum(part in forms for part in name_parts(text.text))
    plain = " ".join(text.text.split())
    for phrase in ALLOWED:
        plain = re.sub(rf"\b{phrase}\b", " ", plain, flags=re.IGNORECASE)
    return len(re.findall(rf"\b(?:{'|'.join(forms)})\b", plain, re.IGNORECASE))


def find(word: str, texts: Iterator[Text]) -> list[Text]:
    """Return the texts that hold a banned word."""
    return [text for text in texts if banned_count(word, text)]


def tally(texts: list[Text]) -> dict[str, Counter[str]]:
    """Count banned, home-made and standard words by kind of text."""
    out = {word: Counter() for word in (*BANNED, *HOME, *STANDARD, "docstring opens badly")}
    patterns = {
        word: (names, prose and re.compile(rf"\b(?:{prose})\b", re.IGNORECASE))
        for word, (names, prose) in {**HOME, **STANDARD}.items()
    }
    opener = re.compile(rf"({'|'.join(OPENERS)})\b")
    # an identifier occurs many times
    for text, times in Counter(text._replace(path="", line=0) for text in texts).items():
        for word in BANNED:
            out[word][text.kind] += times * banned_count(word, text)
        for word, (names, prose) in patterns.items():
            if text.kind == "identifiers":
                out[word][text.kind] += times * (text.text in names)
            elif prose:
                out[word][text.kind] += times * len(prose.findall(text.text))
        if text.kind == "prose" and not text.text.startswith("#"):
            out["docstring opens badly"]["prose"] += times * bool(opener.match(text.text))
    return out


def table(counts: dict[str, Counter[str]]) -> str:
    """Format the counts of ``tally`` as a Markdown table."""
    lines = [f"| word | {' | '.join(KINDS)} |", "| --- |" + " --- |" * len(KINDS)]
    lines += [f"| {w} | {' | '.join(str(c[k]) for k in KINDS)} |" for w, c in counts.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the table, or the hits of one banned word."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--find", choices=BANNED, help="list the hits of a banned word")
    args = parser.parse_args()
    if args.find:
        for hit in find(args.find, texts_of(args.root)):
            print(f"{hit.path}:{hit.line}: {hit.kind}: {' '.join(hit.text.split())[:100]}")
    else:
        print(table(tally(list(texts_of(args.root)))))


if __name__ == "__main__":
    main()
