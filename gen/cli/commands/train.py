"""``gen train``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag, add_overrides


def add_train(commands: Commands) -> None:
    """Add the command ``train``."""
    parser = add_command(
        commands,
        "train",
        "gen.cli.train:train",
        "train a model on the tokens of gen encode",
        "example: gen train configs/train/image-quick.yaml data=tokens out=run steps=500\n"
        "Repeating the command goes on where it ended; accelerate launch -m gen train ... uses"
        " several processes.",
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="training file, or the name of one that comes with gen"
    )
    add_overrides(parser, "steps=500")
    add_json_flag(parser)
    parser.set_defaults(resumable=True)
