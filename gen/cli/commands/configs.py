"""``gen show`` and ``gen cp``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag, add_overrides, add_trust_flag


def add_show(commands: Commands) -> None:
    """Add the command ``show``."""
    parser = add_command(
        commands,
        "show",
        "gen.cli.quick:show",
        "print a resolved config, the parameters of a sampler or preset, or a saved pipeline",
        "examples: gen show image/sjd sampler.window=64\n          gen show speculative_jacobi\n"
        "          gen show FOLDER (of pipe.save_pretrained)",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG|SAMPLER|FOLDER",
        help="a config, sampler or preset (see gen ls), or a saved pipeline",
    )
    add_overrides(parser, "sampler.window=64")
    add_trust_flag(parser)
    add_json_flag(parser)


def add_cp(commands: Commands) -> None:
    """Add the command ``cp``."""
    parser = add_command(commands, "cp", "gen.cli.cp:cp", "copy a config for editing")
    parser.add_argument("config", metavar="CONFIG", help="a path, or a config (see gen ls configs)")
    parser.add_argument("dest", metavar="DEST", help="file to write")
