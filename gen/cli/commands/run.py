"""``gen run``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_overrides, add_trust_flag


def add_run(commands: Commands) -> None:
    """Add the command ``run``."""
    parser = add_command(
        commands,
        "run",
        "gen.cli.quick:run",
        "run a job file",
        "example: gen run image/sjd sampler.window=64 seed=7\nRepeating the command generates only"
        " missing items.",
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="a path, or a packaged config (see gen ls configs)"
    )
    parser.set_defaults(resumable=True)
    add_overrides(parser, "sampler=sjd, sampler.window=64, jobs.0.seed=3")
    parser.add_argument(
        "--prompt-column",
        metavar="NAME",
        help="name of the prompt column (prompt); same as prompt_column=NAME",
    )
    add_trust_flag(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the job and list its items without generating or writing anything",
    )
