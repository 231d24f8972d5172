"""``gen completion``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(commands: Commands) -> None:
    """Add the command ``completion``."""
    parser = add_command(
        commands,
        "completion",
        "gen.cli.completion:completion",
        "print a script for shell completion",
        'example: eval "$(gen completion bash)", or with zsh: gen completion zsh >'
        ' "${fpath[1]}/_gen"',
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" | ".join(SHELLS))
