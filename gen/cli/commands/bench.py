"""``gen bench``."""

from __future__ import annotations

from gen.cli.arguments import Commands, Parser, add_command, add_model_flags, add_sampling_flags


def add_bench(commands: Commands) -> None:
    """Add the command ``bench``."""
    parser = add_command(
        commands,
        "bench",
        "gen.cli.quick:bench",
        "forward passes, wall time and prompt accuracy of samplers, side by side",
        "example: gen bench image --batch-sizes 1,8 --samplers speculative_jacobi,sjd --repeats 3"
        " --out bench.json",
    )
    parser.add_argument(
        "modality",
        metavar="MODALITY",
        help="see gen ls modalities; all: each in turn; or jobs: what the job layer costs",
    )
    parser.add_argument(
        "--samplers",
        metavar="A,B",
        help="names; autoregressive is always measured, as the reference",
    )
    parser.add_argument(
        "--batch-sizes", default="1,8", metavar="N,N", help="items decoded together (1,8)"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        metavar="PARAM=V,V",
        help=(
            "measure samplers that have this parameter with each of these values; may be"
            " repeated: a grid"
        ),
    )
    parser.add_argument(
        "--peers",
        metavar="A,B",
        help=(
            "other implementations on the same weights: transformers, diffusers, reference, or all"
        ),
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help=(
            "measure every masked sampler, preset and selector against models whose distribution"
            " is known, in place of a network"
        ),
    )
    _add_amount_flags(parser)
    _add_report_flags(parser)
    add_model_flags(parser)
    add_sampling_flags(parser)


def _add_amount_flags(parser: Parser) -> None:
    parser.add_argument(
        "--items",
        type=int,
        metavar="N",
        help="with jobs: items without a model, per layout (10000)",
    )
    parser.add_argument(
        "--modalities", metavar="A,B", help="with jobs: modalities whose models are measured (all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything: fewer prompts, repeats, items"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help="prompts per repeat (8, 2 with --quick); with --oracle, tasks of a kind (96)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=(
            "interleaved repeats, with fresh seeds (3, 1 with --quick); with --oracle, seeds per"
            " task (1)"
        ),
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")


def _add_report_flags(parser: Parser) -> None:
    parser.add_argument("--out", metavar="FILE.json", help="write every measurement, run by run")
    parser.add_argument(
        "--json",
        action="store_true",
        help=(
            "for programs: the same as one line on standard output; the table goes to standard"
            " error"
        ),
    )
    parser.add_argument(
        "--gallery",
        metavar="DIR",
        help=(
            "draw prompt accuracy, forward passes, wall time and acceptance as a page in this"
            " folder"
        ),
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
