"""``gen work``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_trust_flag


def add_work(commands: Commands) -> None:
    """Add the command ``work``."""
    parser = add_command(
        commands,
        "work",
        "gen.cli.make:work",
        "join a job as another worker, from any machine that can access its folder",
    )
    parser.set_defaults(resumable=True)
    parser.add_argument("folder", metavar="DIR", help="folder of a job that gen run has started")
    parser.add_argument(
        "--slot",
        type=int,
        default=0,
        metavar="N",
        help="index of this worker; workers with different indices begin at different shards (0)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device of this worker, such as cuda:1, if the job's device is cuda",
    )
    add_trust_flag(parser)
