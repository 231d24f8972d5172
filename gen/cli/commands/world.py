"""``gen world``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_model_flags

PORT = 8765


def add_world(commands: Commands) -> None:
    """Add the command ``world``."""
    parser = add_command(
        commands,
        "world",
        "gen.cli.world:world",
        "play a world in the browser",
        "The page is served to this machine alone. gen sample world records the same clips:\n\n"
        '  gen sample world "right*3 down stay" --seed 0 --out out/clip',
    )
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"port; 0 takes a free one ({PORT})"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    add_model_flags(parser)
