"""``gen sample``."""

from __future__ import annotations

from gen.cli.arguments import Commands, Parser, add_command, add_model_flags, add_sampling_flags


def add_sample(commands: Commands) -> None:
    """Add the command ``sample``."""
    parser = add_command(
        commands,
        "sample",
        "gen.cli.make:sample",
        "generate media for one prompt",
        'example: gen sample image "a large red circle at the top left" --num-samples 4 --seed 0'
        " --out out/first",
    )
    parser.add_argument("modality", metavar="MODALITY", help="see gen ls modalities")
    parser.add_argument("prompt", metavar="PROMPT", help="what to generate")
    parser.add_argument(
        "--num-samples", type=int, metavar="N", help="media per prompt, with seeds S, S+1, ... (1)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the first one (0)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help=(
            "folder to write (out/MODALITY/PROMPT-XXXXXX, one per job); the same command again"
            " resumes"
        ),
    )
    _add_edit_flags(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="items decoded together (8); changes the speed only",
    )
    parser.add_argument(
        "--trace", type=int, metavar="N", help="items whose decoding steps are recorded (1)"
    )
    parser.add_argument(
        "--sampler",
        metavar="NAME",
        help="see gen ls samplers and gen ls presets (speculative_jacobi)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="any key of a job file, such as sampler.window=64; may be repeated",
    )
    add_model_flags(parser)
    add_sampling_flags(parser)


def _add_edit_flags(parser: Parser) -> None:
    parser.add_argument(
        "--source",
        metavar="FILE",
        help="edit this file: only what --mask or --span covers is generated anew",
    )
    parser.add_argument("--mask", metavar="FILE", help="an image, white where to generate anew")
    parser.add_argument(
        "--span", metavar="SPAN", help="frames to generate anew, such as 20:60, or 'upper 20:60'"
    )
    parser.add_argument(
        "--prefix", metavar="FILE", help="continue this file: every result begins with it"
    )
    parser.add_argument(
        "--frames",
        type=int,
        metavar="N",
        help="length of the results, where a modality lets you choose it",
    )
