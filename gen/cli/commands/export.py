"""``gen export``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_export(commands: Commands) -> None:
    """Add the command ``export``."""
    parser = add_command(
        commands,
        "export",
        "gen.jobs.export:export",
        "write the manifest of a job as one Parquet file",
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--parquet", metavar="FILE", required=True)
    parser.add_argument(
        "--media", action="store_true", help="with the media themselves, as a column of bytes"
    )
