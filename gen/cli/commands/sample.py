"""``gen sample``."""

from __future__ import annotations

from gen.cli.arguments import (
    Commands,
    Parser,
    add_command,
    add_model_flags,
    add_overrides,
    add_sampling_flags,
)


def add_sample(commands: Commands) -> None:
    """Add the command ``sample``."""
    parser = add_command(
        commands,
        "sample",
        "gen.cli.quick:sample",
        "generate media for one prompt",
        'examples: gen sample image "a large red circle at the top left" -n 4 --seed 0 --out'
        ' out/first\n          gen sample image "a red circle" -o ring.webp sampler.window=64',
    )
    parser.set_defaults(resumable=True)
    parser.add_argument("modality", metavar="MODALITY", help="see gen ls modalities")
    parser.add_argument("prompt", metavar="PROMPT", help="what to generate")
    add_overrides(parser, "sampler.window=64")
    parser.add_argument(
        "-n",
        "--num-samples",
        type=int,
        metavar="N",
        help="media per prompt, with seeds S, S+1, ... (1)",
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
    _add_file_flags(parser)
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
    add_model_flags(parser)
    add_sampling_flags(parser)


def _add_file_flags(parser: Parser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        dest="file",
        metavar="FILE",
        help=(
            "write one file and no folder, in the format of its extension; - is stdout; several"
            " samples are numbered"
        ),
    )
    parser.add_argument(
        "--format",
        metavar="EXT",
        help="png, webp, jpg; wav, flac, mp3; mp4, gif, mkv (the first of its kind)",
    )


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
