"""``gen status``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag


def add_status(commands: Commands) -> None:
    """Add the command ``status``."""
    parser = add_command(
        commands,
        "status",
        "gen.jobs.status:status",
        "progress of a job folder, also while a run is at work",
    )
    parser.add_argument("folder", metavar="DIR")
    add_json_flag(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the progress until all is made; with --json, one report per line",
    )
