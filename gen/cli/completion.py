"""Command ``completion``."""

from __future__ import annotations

import argparse

import shtab

from gen.cli.names import source_names

FILES = ("FILE", "CONFIG", "DEST")


def completion(args: argparse.Namespace) -> int:
    """Print a completion script: commands, flags, files, and the names of the packaged parts."""
    from gen.cli.parser import build  # the parser imports all commands, this one too

    parser = build()
    _complete(parser)
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _complete(parser: argparse.ArgumentParser) -> None:
    """Tell each argument what its values may be, in this parser and those of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete(command)
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar == "MODALITY":
            action.choices = sorted(source_names("modality"))
        elif action.dest == "sampler":
            action.choices = sorted(source_names("sampler"))
