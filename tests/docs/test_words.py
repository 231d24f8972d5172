"""Banned home-made words occur nowhere in code, docstrings, messages or pages; a control text with
each of them is caught."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.spec_from_file_location("gen_docs_words", ROOT / "docs" / "words.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def texts(words):
    return list(words.texts_of(ROOT))


@pytest.mark.parametrize("word", ["place", "law", "fulfilled", "picture", "knob"])
def test_a_banned_word_occurs_nowhere(words, texts, word):
    hits = [f"{t.path}:{t.line}: {' '.join(t.text.split())[:90]}" for t in words.find(word, texts)]
    assert not hits, f"{len(hits)} hits of {word!r}:\n" + "\n".join(hits[:40])


CODE = '''
def {word}_of(model):
    """Return the {word} of a model."""
    first_{word}s = model  # one {word} per row
    raise ValueError(f"{{model}} has no {word} at all")
'''


@pytest.mark.parametrize("word", ["place", "law", "fulfilled", "picture", "knob"])
def test_a_control_text_is_caught(words, word):
    """Negative control: every kind of text that holds the word is found."""
    found = words.find(word, words.python_texts("control.py", CODE.format(word=word)))
    kinds = [text.kind for text in found]
    assert kinds.count("prose") == 2 and kinds.count("messages") == 1
    assert kinds.count("identifiers") == (1 if word == "fulfilled" else 2)
    page = f"The {word} comes first.\n```python\n{word} = 1\n```\nInline `{word}` is code."
    assert [text.line for text in words.find(word, words.page_texts("page.md", page))] == [1]
    comment = words.config_texts("job.yaml", f"steps: 4  # a {word}\n{word}: 1\n")
    assert [text.line for text in words.find(word, comment)] == [1]


@pytest.mark.parametrize(
    "text",
    [
        "Change the tensor in place; no placeholder is placed here.",
        "Updates take place once.",
        "A flaw, a lawn and an outlaw.",
        "Lengths follow a power law, rounded to two decimal places.",
    ],
)
def test_ordinary_senses_pass(words, text):
    assert not any(words.find(word, words.page_texts("page.md", text)) for word in words.BANNED)


def test_the_scan_reads_the_product(words, texts):
    """Negative control: an empty scan would find no banned word either."""
    kinds = {kind: sum(t.kind == kind for t in texts) for kind in words.KINDS}
    assert all(count > 100 for count in kinds.values()), kinds
    counts = words.tally([t for t in texts if t.kind in ("identifiers", "pages")])
    assert counts["position(s)"]["identifiers"] > 100 and counts["token(s)"]["pages"] > 50
