"""``gen decode``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_decode(commands: Commands) -> None:
    """Add the command ``decode``."""
    parser = add_command(
        commands,
        "decode",
        "gen.jobs.decode:decode",
        "make media of the tokens that a job kept, with their frontend or another one",
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument(
        "--out", metavar="D", required=True, help="folder to write; the same command again resumes"
    )
    parser.add_argument(
        "--frontend", metavar="NAME", help="zoo name or folder (the one the tokens were made with)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="new location of the tokens' model, if it was moved"
    )
    parser.add_argument("--device", metavar="NAME", help="default: as the job")
    parser.add_argument("--dtype", metavar="NAME", help="default: as the job")
    parser.add_argument(
        "--force", action="store_true", help="replace what was decoded into D otherwise"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the code in the model's folder run, as the job did",
    )
