"""Cleaning of captions as in the training of DeepFloyd IF, PixArt and LlamaGen.

The published function repairs mis-decoded text with the package ftfy as well, which changes no
caption in ASCII; here text is only brought into Unicode's composed form. A caption that ends in an
ampersand and letters (``b&w``) loses the sign there and becomes two words here.
"""

from __future__ import annotations

import html
import re
import unicodedata
from html.parser import HTMLParser
from urllib.parse import unquote_plus

DOMAINS = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
ENDINGS = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
DASHES = (
    r"\u002D\u058A\u05BE\u1400\u1806\u2010-\u2015\u2E17\u2E1A\u2E3A\u2E3B\u2E40\u301C\u3030\u30A0"
    r"\uFE31\uFE32\uFE58\uFE63\uFF0D"
)
HYPHENS = re.compile(r"[-_]")
MANY = 3  # hyphens of a caption that stay hyphens

# patterns and what stands in their place, in this order
ADDRESSES = (
    ("<person>", "person"),
    (rf"\b((?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{DOMAINS}))", ""),
    (rf"\b((?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{DOMAINS}))", ""),
)
SIGNS = (
    (r"@[\w\d]+\b", ""),
    (r"[\u31c0-\u31ef\u31f0-\u31ff\u3200-\u33ff\u3400-\u4dff\u4e00-\u9fff]+", ""),
    (f"[{DASHES}]+", "-"),
    (r"[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    (r"[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{ENDINGS})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
WORDS = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{ENDINGS})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
)


class _Text(HTMLParser):
    """Collector of the text between the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def cleaned(caption: str) -> str:
    """Clean a caption as the published loaders do: twice."""
    return _cleaned_once(_cleaned_once(caption))


def _cleaned_once(caption: str) -> str:
    text = _replaced(unquote_plus(caption).strip().lower(), ADDRESSES)
    parser = _Text()
    parser.feed(text)
    parser.close()
    text = _replaced("".join(parser.parts), SIGNS)
    if len(HYPHENS.findall(text)) > MANY:
        text = HYPHENS.sub(" ", text)
    text = unicodedata.normalize("NFC", html.unescape(html.unescape(text))).strip()
    return _replaced(text, WORDS).strip()


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
