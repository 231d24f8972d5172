"""Parser of the command line, and hints for what was mistyped.

Imports nothing heavy: help is quick.
"""

from __future__ import annotations

import argparse

from gen.cli.arguments import Parser, nearest
from gen.cli.commands.bench import add_bench
from gen.cli.commands.check import add_check
from gen.cli.commands.configs import add_cp, add_show
from gen.cli.commands.decode import add_decode
from gen.cli.commands.demo import add_demo
from gen.cli.commands.doctor import add_doctor
from gen.cli.commands.export import add_export
from gen.cli.commands.gallery import add_gallery
from gen.cli.commands.ls import add_ls
from gen.cli.commands.run import add_run
from gen.cli.commands.sample import add_sample
from gen.cli.commands.status import add_status
from gen.cli.commands.work import add_work
from gen.core.errors import GenError
from gen.core.versions import installed

COMMANDS = (
    add_sample,
    add_run,
    add_demo,
    add_work,
    add_ls,
    add_show,
    add_cp,
    add_status,
    add_gallery,
    add_check,
    add_decode,
    add_export,
    add_doctor,
    add_bench,
)


def build() -> Parser:
    """Build the parser of ``gen`` with all commands."""
    parser = Parser(
        prog="gen",
        description="Every modality becomes tokens, and one registry of samplers decodes them all.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"gen {installed('gen-toolkit') or '(not installed)'}",
    )
    parser.set_defaults(command=None, parser=parser, overrides=None, prompt=None)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for add in COMMANDS:
        add(commands)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line.

    Returns:
        The arguments; ``command`` is the function to call with them.

    Raises:
        GenError: for anything unknown, with the nearest name.
        SystemExit: with 0, for ``--help``, ``--version`` and no argument at all.
    """
    parser = build()
    args, extra = parser.parse_known_args(argv)
    if args.overrides is not None:  # argparse drops positionals that follow a flag
        args.overrides += [x for x in extra if not x.startswith("-") and "=" in x]
        extra = [x for x in extra if x.startswith("-") or "=" not in x]
    if extra:
        raise _unexpected(extra, args)
    if args.command is None:
        parser.print_help()
        raise SystemExit(0)
    return args


def _unexpected(extra: list[str], args: argparse.Namespace) -> GenError:
    """Explain arguments that no command takes."""
    wrong = next((x for x in extra if x.startswith("-")), extra[0])
    if wrong.startswith("-"):
        flag, known = wrong.partition("=")[0], args.parser.flags()
        listed = ", ".join(f for f in known if f.startswith("--"))
        return GenError(f"unknown flag {flag!r}.{nearest(flag, known)} Known: {listed}")
    hint = (
        "quote a prompt of several words"
        if args.prompt is not None
        else f"see {args.parser.prog} --help"
    )
    return GenError(f"unexpected argument {wrong!r}; {hint}")
