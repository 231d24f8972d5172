"""``gen decode``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_decode(commands: Commands) -> None:
    """Add the command ``decode``."""
    parser = add_command(
        commands,
        "decode",
        "gen.jobs.decode:decode",
        "decode the stored tokens of a job into media, with their own frontend or another one",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of a job with tokens: true")
    parser.add_argument(
        "--out", metavar="D", required=True, help="folder to write; repeating the command resumes"
    )
    parser.add_argument(
        "--frontend",
        metavar="NAME",
        help="zoo name or folder (default: the frontend of the tokens)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="new location of the model that made the tokens, if moved"
    )
    parser.add_argument("--device", metavar="NAME", help="default: that of the job")
    parser.add_argument("--dtype", metavar="NAME", help="default: that of the job")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace media in D that were decoded with other settings",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the model's folder, as the job did",
    )
