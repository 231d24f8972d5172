"""``gen check``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag


def add_check(commands: Commands) -> None:
    """Add the command ``check``."""
    parser = add_command(
        commands,
        "check",
        "gen.cli.check:check",
        "check the media of a job folder against their prompts",
    )
    parser.add_argument("folder", metavar="DIR", help="job folder")
    add_json_flag(parser)
