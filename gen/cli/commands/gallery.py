"""``gen gallery``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_gallery(commands: Commands) -> None:
    """Add the command ``gallery``."""
    parser = add_command(
        commands, "gallery", "gen.cli.check:gallery", "rewrite the gallery of a job folder"
    )
    parser.add_argument("folder", metavar="DIR", help="job folder")
