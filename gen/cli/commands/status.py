"""``gen status``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag


def add_status(commands: Commands) -> None:
    """Add the command ``status``."""
    parser = add_command(
        commands,
        "status",
        "gen.jobs.status:status",
        "show the progress of a job folder, also during a run",
    )
    parser.add_argument("folder", metavar="DIR", help="job folder")
    add_json_flag(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="keep showing the progress until the job is complete; with --json, a report per line",
    )
