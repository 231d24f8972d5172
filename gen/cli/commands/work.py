"""``gen work``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_work(commands: Commands) -> None:
    """Add the command ``work``."""
    parser = add_command(
        commands,
        "work",
        "gen.cli.make:work",
        "join a job that gen run has begun, from any machine that sees its folder",
    )
    parser.set_defaults(resumable=True)
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument(
        "--slot",
        type=int,
        default=0,
        metavar="N",
        help="number of this worker among several: they begin at different shards (0)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where the job says cuda: the device of this worker, such as cuda:1",
    )
