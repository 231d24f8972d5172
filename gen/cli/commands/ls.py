"""``gen ls``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag

KINDS = (
    "samplers",
    "presets",
    "parts",
    "layouts",
    "tokenizers",
    "modalities",
    "models",
    "families",
    "configs",
)


def add_ls(commands: Commands) -> None:
    """Add the command ``ls``."""
    parser = add_command(commands, "ls", "gen.cli.info:ls", "list what there is")
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=" | ".join(KINDS))
    add_json_flag(parser)
