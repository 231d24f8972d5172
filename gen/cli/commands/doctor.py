"""``gen doctor``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag


def add_doctor(commands: Commands) -> None:
    """Add the command ``doctor``."""
    parser = add_command(
        commands,
        "doctor",
        "gen.cli.doctor:doctor",
        "report packages, devices, models and what is missing",
    )
    add_json_flag(parser)
