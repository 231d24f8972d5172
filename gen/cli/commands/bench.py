"""``gen bench``."""

from __future__ import annotations

from gen.cli.arguments import Commands, Parser, add_command, add_model_flags, add_sampling_flags


def add_bench(commands: Commands) -> None:
    """Add the command ``bench``."""
    parser = add_command(
        commands,
        "bench",
        "gen.cli.quick:bench",
        "compare samplers by forward passes, wall time and prompt accuracy",
        "example: gen bench image --batch-sizes 1,8 --samplers speculative_jacobi,sjd --repeats 3"
        " --out bench.json",
    )
    parser.add_argument(
        "modality",
        metavar="MODALITY",
        help="a modality (see gen ls modalities), all for each in turn, or jobs for the job layer",
    )
    parser.add_argument(
        "--samplers",
        metavar="A,B",
        help="names; autoregressive is always included as the reference",
    )
    parser.add_argument(
        "--batch-sizes", default="1,8", metavar="N,N", help="items decoded together (1,8)"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        metavar="PARAM=V,V",
        help=(
            "measure every sampler that has this parameter with each value; repeat the flag for a"
            " grid"
        ),
    )
    parser.add_argument(
        "--peers",
        metavar="A,B",
        help=(
            "other implementations of the same models: transformers, diffusers, reference, or all"
        ),
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help=(
            "measure masked samplers, presets and selectors on models with a known distribution"
            " instead of a network"
        ),
    )
    _add_size_flags(parser)
    _add_protocol_flag(parser)
    _add_amount_flags(parser)
    _add_report_flags(parser)
    add_model_flags(parser)
    add_sampling_flags(parser)


def _add_size_flags(parser: Parser) -> None:
    parser.add_argument(
        "--inflate",
        metavar="N,N",
        help=(
            "measure function-preserving enlargements of the models (see gen inflate) of so many"
            " parameters, such as 85M,300M,1B"
        ),
    )
    parser.add_argument(
        "--estimate",
        metavar="DEVICE",
        help=(
            "estimate the time on a device from counted kernels instead of measuring it: a100,"
            " h100, h200, l4, l40s, here, or a file of gen doctor --measure"
        ),
    )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="with --estimate here: measure the rows too, and print the ratio",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="time the forward passes one by one, and print the share of the time outside of them",
    )


def _add_protocol_flag(parser: Parser) -> None:
    parser.add_argument(
        "--protocol",
        choices=["usual", "speed", "search"],
        default="usual",
        help=(
            "speed: SPEED-Bench's, acceptance length and throughput by category of prompts, by"
            " entropy and by concurrency (--batch-sizes); search: reward of searches at equal"
            " forward passes"
        ),
    )


def _add_amount_flags(parser: Parser) -> None:
    parser.add_argument(
        "--items",
        type=int,
        metavar="N",
        help="with jobs: number of items without a model, per layout (10000)",
    )
    parser.add_argument(
        "--modalities",
        metavar="A,B",
        help="with jobs: modalities to measure with their models (all)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts, repeats and items")
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help=(
            "prompts per repeat (8, 2 with --quick, 1 with --inflate); with --oracle, tasks of each"
            " kind (96)"
        ),
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=(
            "interleaved repeats with fresh seeds (3, 1 with --quick); with --oracle, seeds per"
            " task (1)"
        ),
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="first seed of the first repeat (0)"
    )


def _add_report_flags(parser: Parser) -> None:
    parser.add_argument("--out", metavar="FILE.json", help="write the measurements of every run")
    parser.add_argument(
        "--runs",
        metavar="FILE.jsonl",
        help=(
            "write every measurement as it is made to this file, and go on with those that are in"
            " it (FILE.jsonl of --out or out/bench/MODALITY.jsonl, until the benchmark is over)"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=(
            "print the report as one line of JSON on standard output, and the table on standard"
            " error"
        ),
    )
    parser.add_argument(
        "--gallery",
        metavar="DIR",
        help=(
            "write a page with plots of prompt accuracy, forward passes, wall time and acceptance"
            " to this folder"
        ),
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
