"""``gen ls``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag

# kind -> function that lists it; some of the modules are heavy
LISTINGS = {
    "samplers": "gen.cli.listings.methods:samplers",
    "presets": "gen.cli.listings.methods:presets",
    "drafters": "gen.cli.listings.methods:drafters",
    "shapes": "gen.cli.listings.methods:shapes",
    "verifiers": "gen.cli.listings.methods:verifiers",
    "parts": "gen.cli.listings.methods:parts",
    "scorers": "gen.cli.listings.methods:scorers",
    "constraints": "gen.cli.listings.registered:constraints",
    "layouts": "gen.cli.listings.registered:layouts",
    "tokenizers": "gen.cli.listings.registered:tokenizers",
    "modalities": "gen.cli.listings.registered:modalities",
    "metrics": "gen.cli.listings.registered:metrics",
    "models": "gen.cli.listings.files:models",
    "families": "gen.cli.listings.registered:families",
    "configs": "gen.cli.listings.files:configs",
}


def add_ls(commands: Commands) -> None:
    """Add the command ``ls``."""
    parser = add_command(
        commands, "ls", "gen.cli.ls:ls", "list samplers, models and everything else registered"
    )
    parser.add_argument(
        "kind", metavar="KIND", nargs="?", choices=list(LISTINGS), help=" | ".join(LISTINGS)
    )
    add_json_flag(parser)
