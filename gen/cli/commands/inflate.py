"""``gen inflate``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag


def add_inflate(commands: Commands) -> None:
    """Add the command ``inflate``."""
    parser = add_command(
        commands,
        "inflate",
        "gen.cli.inflate:inflate_model",
        "write an enlargement of a Llama-shaped model that computes the same function",
        "example: gen inflate image-causal --params 85M --out out/image-85M && gen sample image"
        ' "a red circle" --model out/image-85M',
    )
    parser.add_argument("model", metavar="MODEL", help="zoo name or folder")
    parser.add_argument(
        "--params", required=True, metavar="N", help="number of parameters, such as 85M or 1B"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder that does not exist")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the random weights (0)"
    )
    add_json_flag(parser)
