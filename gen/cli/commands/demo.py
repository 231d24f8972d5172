"""``gen demo``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_demo(commands: Commands) -> None:
    """Add the command ``demo``."""
    parser = add_command(
        commands,
        "demo",
        "gen.cli.demo:demo",
        "generate, check and compare samples of all modalities in about a minute",
        "Runs the packaged config `demo`, checks its outputs, and compares speculative Jacobi"
        " decoding with\nautoregression: the same images from the same seeds.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="any key of a job file, such as seed=7",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write (out/demo)")
