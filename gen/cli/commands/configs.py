"""``gen show`` and ``gen cp``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_show(commands: Commands) -> None:
    """Add the command ``show``."""
    parser = add_command(
        commands, "show", "gen.cli.show:show", "print a resolved config and its fingerprint"
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")


def add_cp(commands: Commands) -> None:
    """Add the command ``cp``."""
    parser = add_command(commands, "cp", "gen.cli.cp:cp", "copy a config to edit it")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("dest", metavar="DEST")
