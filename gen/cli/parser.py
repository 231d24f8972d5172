"""Parser of the command line, and hints for what was mistyped.

Imports nothing heavy: help is quick.
"""

from __future__ import annotations

import argparse
import re
from functools import cache

from gen.cli.arguments import Parser
from gen.cli.commands.bench import add_bench
from gen.cli.commands.check import add_check
from gen.cli.commands.completion import add_completion
from gen.cli.commands.configs import add_cp, add_show
from gen.cli.commands.decode import add_decode
from gen.cli.commands.demo import add_demo
from gen.cli.commands.doctor import add_doctor
from gen.cli.commands.encode import add_encode
from gen.cli.commands.eval import add_eval
from gen.cli.commands.export import add_export
from gen.cli.commands.gallery import add_gallery
from gen.cli.commands.inflate import add_inflate
from gen.cli.commands.ls import add_ls
from gen.cli.commands.run import add_run
from gen.cli.commands.sample import add_sample
from gen.cli.commands.serve import add_serve
from gen.cli.commands.status import add_status
from gen.cli.commands.train import add_train
from gen.cli.commands.work import add_work
from gen.cli.commands.world import add_world
from gen.config.keys import KEYS
from gen.core.errors import GenError, hint, nearest, shown
from gen.core.paths import expand_user
from gen.core.versions import gen_version

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
    add_eval,
    add_decode,
    add_export,
    add_encode,
    add_train,
    add_inflate,
    add_doctor,
    add_bench,
    add_serve,
    add_world,
    add_completion,
)
OVERRIDE = re.compile(r"([a-z_]+)(\.[\w.-]+)?=")  # such as sampler.window=64
# arguments that are paths; a shell expands ~ only where it begins a word
PATHS = ("config", "dataset", "dest", "file", "folder", "out", "parquet")


def build() -> Parser:
    """Build the parser of ``gen`` with all commands."""
    parser = Parser(
        prog="gen",
        description="Every modality becomes tokens, and one registry of samplers decodes them all.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"gen {gen_version()}",
    )
    parser.set_defaults(command=None, parser=parser, prompt=None, resumable=False)
    parser.set_defaults(overrides=None, set_values=())
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for add in COMMANDS:
        add(commands)
    return parser


@cache
def _parser() -> Parser:
    """Build the parser of this process, which takes longer than to parse a line."""
    return build()


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line.

    Returns:
        The arguments; ``command`` is the function to call with them.

    Raises:
        GenError: for anything unknown, with the nearest name.
        SystemExit: with 0, for ``--help``, ``--version`` and no argument at all.
    """
    parser = _parser()
    args, extra = parser.parse_known_args([_hyphenated(x) for x in argv])
    if args.overrides is not None:  # argparse drops positionals that follow a flag
        said = [*args.overrides, *(x for x in extra if not x.startswith("-"))]
        if args.prompt is not None:
            args.prompt, said = _prompt_of([args.prompt, *said])
        args.overrides = [*(x for x in said if "=" in x), *_set_values(args)]
        extra = [x for x in said if "=" not in x] + [x for x in extra if x.startswith("-")]
    if extra:
        raise _unexpected(extra, args)
    for key in PATHS:
        if str(vars(args).get(key) or "").startswith("~"):
            setattr(args, key, str(expand_user(getattr(args, key))))
    if args.command is None:
        parser.print_help()
        raise SystemExit(0)
    return args


def _prompt_of(words: list[str]) -> tuple[str, list[str]]:
    """Tell the prompt, wherever it stands, from ``KEY=VALUE``; return it and the other words."""
    words = [word for word in words if word]
    at = next((i for i, word in enumerate(words) if not _is_override(word)), None)
    return ("", words) if at is None else (words[at], words[:at] + words[at + 1 :])


def _is_override(word: str) -> bool:
    """Return whether a word begins with a key of a job file, or one that is nearly spelt so."""
    found = OVERRIDE.match(word)
    return found is not None and (found[1] in KEYS or nearest(found[1], KEYS) is not None)


def _set_values(args: argparse.Namespace) -> list[str]:
    """List the values of ``--set``. Raises ``GenError`` for one without a key."""
    for value in args.set_values:
        if "=" not in value:
            raise GenError(f"--set {shown(value)}; expected KEY=VALUE, such as sampler.window=64")
    return list(args.set_values)


def _hyphenated(word: str) -> str:
    """Return ``--num_samples=4`` as ``--num-samples=4``; both spellings are in use elsewhere."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if flag.startswith("--") else word


def _unexpected(extra: list[str], args: argparse.Namespace) -> GenError:
    """Explain arguments that no command takes."""
    wrong = next((x for x in extra if x.startswith("-")), extra[0])
    if wrong.startswith("-"):
        flag, known = wrong.partition("=")[0], args.parser.flags()
        listed = ", ".join(f for f in known if f.startswith("--"))
        key = flag.lstrip("-").replace("-", "_")
        if args.overrides is not None and key in KEYS:
            value = wrong.partition("=")[2] or next((x for x in extra if x != wrong), "VALUE")
            return GenError(
                f"unknown flag {flag!r}; {args.parser.prog} takes the keys of a job file without"
                f" hyphens, as in {key}={value}"
            )
        return GenError(f"unknown flag {flag!r}.{hint(flag, known)} Known: {listed}")
    if args.prompt is not None:
        expected = "a prompt of several words in quotes, or KEY=VALUE"
    elif args.overrides is not None:
        expected = "KEY=VALUE"
    else:
        expected = f"nothing more (see {args.parser.prog} --help)"
    return GenError(f"unexpected argument {shown(wrong)}; expected {expected}")
