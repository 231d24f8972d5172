"""``gen eval``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command, add_json_flag


def add_eval(commands: Commands) -> None:
    """Add the command ``eval``."""
    parser = add_command(
        commands,
        "eval",
        "gen.cli.eval:evaluate_folder",
        "compute metrics over the media of a job folder, or the held-out loss of a model",
        "example: gen eval out/first --metrics fid,clip_score --reference photos"
        " fid.features=inception.py:features clip_score.model=openai/clip-vit-base-patch32\n"
        "Repeating the command measures only what is missing.",
    )
    parser.add_argument(
        "folder", metavar="DIR", help="job folder; with --held-out the folder of a run or a model"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="METRIC.PARAMETER=VALUE",
        help="parameters of metrics (see gen ls metrics --json)",
    )
    parser.add_argument("--metrics", metavar="A,B", help="names (see gen ls metrics)")
    parser.add_argument(
        "--reference",
        metavar="DIR",
        help="reference: job folder, folder of media, or .npz with mu and sigma",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=1,
        help="processes (1); the figures do not depend on it",
    )
    parser.add_argument("--device", metavar="NAME", help="device of the metrics' models (cpu)")
    parser.add_argument(
        "--fresh", action="store_true", help="discard stored results and measure again"
    )
    parser.add_argument(
        "--held-out",
        metavar="DATA",
        help="folder of gen encode: print the loss of a trained model on it, in bits",
    )
    parser.add_argument(
        "--write-geneval",
        metavar="OUT",
        help="write the images in GenEval's layout instead, for its evaluate_images.py",
    )
    add_json_flag(parser)
