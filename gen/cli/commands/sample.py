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
    parser.add_argument("modality", metavar="MODALITY", help="a modality (see gen ls modalities)")
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        default="",
        help="text that describes the output (none)",
    )
    add_overrides(parser, "sampler.window=64")
    parser.add_argument(
        "-n",
        "--num-samples",
        type=int,
        metavar="N",
        help="number of samples, with seeds S, S+1, ... (1)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the first sample (0)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help=(
            "folder to write (out/MODALITY/PROMPT-XXXXXX, one per job); repeating the command"
            " resumes"
        ),
    )
    _add_file_flags(parser)
    _add_condition_flags(parser)
    _add_edit_flags(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="items decoded together (8); affects only the speed",
    )
    parser.add_argument(
        "--trace",
        type=int,
        metavar="N",
        help="number of items whose decoding steps are recorded (1)",
    )
    parser.add_argument(
        "--sampler",
        metavar="NAME",
        help="a sampler or preset (see gen ls samplers, gen ls presets; default: the model's)",
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
            "write a single file instead of a folder, in the format of its extension; - is stdout;"
            " several samples are numbered"
        ),
    )
    parser.add_argument(
        "--format",
        metavar="EXT",
        help="file format: png, webp, jpg; wav, flac, mp3; mp4, gif, mkv (default: the first)",
    )


def _add_condition_flags(parser: Parser) -> None:
    for flag, name, text in (
        ("--image", "images", "image that is part of the condition; may be repeated"),
        ("--audio", "audio", "sound that is part of the condition; may be repeated"),
        ("--video", "video", "clip that is part of the condition; may be repeated"),
    ):
        parser.add_argument(flag, dest=name, action="append", metavar="FILE", help=text)
    parser.add_argument(
        "--observation", metavar="FILE", help="JSON or .npz file with the observation of a robot"
    )
    parser.add_argument(
        "--messages", metavar="FILE", help="JSON file with the turns of a conversation"
    )


def _add_edit_flags(parser: Parser) -> None:
    parser.add_argument(
        "--source",
        metavar="FILE",
        help="file to edit: only the region of --mask or --span is regenerated",
    )
    parser.add_argument("--mask", metavar="FILE", help="image whose white pixels are regenerated")
    parser.add_argument(
        "--span", metavar="SPAN", help="frames to regenerate, such as 20:60, or 'upper 20:60'"
    )
    parser.add_argument(
        "--prefix", metavar="FILE", help="file to continue: every output begins with it"
    )
    parser.add_argument(
        "--frames",
        type=int,
        metavar="N",
        help="length of the outputs, for modalities of variable length",
    )
