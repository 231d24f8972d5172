"""``gen encode``."""

from __future__ import annotations

from argparse import ArgumentParser

from gen.cli.arguments import Commands, add_command, add_json_flag

FITS = ("crop", "pad", "bucket")  # those of gen.media.fit, which is not imported for the help


def add_encode(commands: Commands) -> None:
    """Add the command ``encode``."""
    parser = add_command(
        commands,
        "encode",
        "gen.cli.encode:encode",
        "encode a folder of media into shards of tokens, to train on",
        "example: gen encode image photos --out tokens --resize\n"
        "Captions are NAME.txt beside a medium, or rows of metadata.jsonl with file_name and text."
        "\nRepeating the command goes on where it ended.",
    )
    parser.add_argument("modality", metavar="MODALITY", help="a modality (see gen ls modalities)")
    parser.add_argument(
        "folder", metavar="FOLDER", help="media, or .txt files of one text per line"
    )
    parser.add_argument("--out", metavar="D", required=True, help="folder of the shards")
    parser.add_argument(
        "--frontend",
        metavar="NAME",
        help=(
            "zoo name or folder of a frontend, or of a model with a tokenizer (default: that of"
            " the modality)"
        ),
    )
    _add_captions(parser)
    _add_given(parser)
    _add_sizes(parser)
    parser.add_argument(
        "--copies",
        metavar="N",
        type=int,
        default=1,
        help=(
            "encode every image or sound N times, all but the first a little shifted: against"
            " learning a small folder by heart (1)"
        ),
    )
    parser.add_argument(
        "--shard-items", metavar="N", type=int, default=256, help="files of a shard (256)"
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="device (cpu)")
    add_json_flag(parser)
    parser.set_defaults(resumable=True)


def _add_captions(parser: ArgumentParser) -> None:
    """Add what reads captions or texts."""
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        default="auto",
        help=(
            "tokenizer of the captions or texts: built-in (the language of the built-in models),"
            " own (trained on them), a folder with one, or auto: own where the built-in language"
            " lacks most of them (auto)"
        ),
    )
    parser.add_argument(
        "--vocab-size",
        metavar="N",
        type=int,
        default=2048,
        help="most tokens of a tokenizer that is trained (2048)",
    )
    parser.add_argument(
        "--labels",
        metavar="NAME",
        default="",
        help=(
            "take labels for captions: folders (the name of the folder that a file lies in), or a"
            " field of metadata.jsonl"
        ),
    )
    parser.add_argument(
        "--text-encoder",
        metavar="FOLDER",
        help="T5, CLIP or language model whose states of the captions condition the model",
    )


def _add_given(parser: ArgumentParser) -> None:
    """Add what reads media in the conditions."""
    parser.add_argument(
        "--given",
        metavar="FOLDER",
        help=(
            "images, sounds or clips that stand in the conditions, by the same names; it may be the"
            " folder of the media (default: the columns image, audio or video of the table)"
        ),
    )
    parser.add_argument(
        "--given-frontend",
        metavar="NAME",
        help="zoo name or folder of their frontend (default: that of the media, or the usual one)",
    )
    parser.add_argument(
        "--given-size",
        metavar="HxW",
        help="size that they are read at (default: that of the media, or the usual one)",
    )


def _add_sizes(parser: ArgumentParser) -> None:
    """Add what becomes of media of another size, and of those that cannot be read."""
    parser.add_argument(
        "--size", metavar="HxW", help="size of the media (default: that of the built-in models)"
    )
    parser.add_argument(
        "--resize",
        nargs="?",
        choices=FITS,
        const=FITS[0],
        default="",
        help=(
            "make media of another size fit: crop scales images and clips and cuts their edges"
            " (default), pad scales them onto a ground, bucket crops at a size of about that area"
            " that fits the folder's; longer media are cut into windows, shorter ones filled,"
            " channels of sounds mixed"
        ),
    )
    parser.add_argument(
        "--skeleton",
        metavar="FILE",
        help="JSON file with the joint of BVH files for each joint of gen's skeleton",
    )
    parser.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="leave out files that cannot be read; the manifest names them",
    )
