"""Hooks of the site: links that leave the pages, and the reference of the command line.

MkDocs calls ``on_page_markdown`` for every page before it is rendered.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Fill in the reference of the command line."""
    return markdown.replace(COMMANDS, command_reference()) if COMMANDS in markdown else markdown


def command_reference() -> str:
    """Describe every command of the parser: usage, arguments and flags, as Markdown."""
    from gen.cli.parser import build  # the parser is needed for one page only

    return "\n".join(line for name, parser in subparsers(build()) for line in section(name, parser))


def subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands of a parser in their order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the Markdown lines of one command."""
    usage = parser.format_usage().removeprefix("usage: ").replace("\n       ", "\n").strip()
    yield from (f"## gen {name}", "", parser.description or "", "", "```text", usage, "```", "")
    rows = [row(action, parser) for action in parser._actions if action.help != argparse.SUPPRESS]
    if rows:
        yield from ("| argument | meaning |", "| --- | --- |", *rows, "")


def row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Write the table row of an argument."""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    if not names:
        names = f"`{metavar}`"
    elif action.nargs != 0:
        names += f" `{action.metavar or action.dest.upper()}`"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| {names} | {re.sub(r'[|]', '&#124;', text)} |"
