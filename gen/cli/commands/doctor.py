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
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure bandwidth, FLOP/s by rows, and time per kernel, for gen bench --estimate",
    )
    parser.add_argument(
        "--out", metavar="FILE.json", help="with --measure: write the rates to this file"
    )
    parser.add_argument("--device", metavar="NAME", help="with --measure: device (cpu)")
    parser.add_argument("--dtype", metavar="NAME", help="with --measure: dtype (float32)")
    add_json_flag(parser)
