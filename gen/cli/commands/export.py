"""``gen export``."""

from __future__ import annotations

from gen.cli.arguments import Commands, add_command


def add_export(commands: Commands) -> None:
    """Add the command ``export``."""
    parser = add_command(
        commands,
        "export",
        "gen.cli.export:export",
        "export a job as one Parquet file, or as a folder for datasets.load_dataset",
        "examples: gen export out/first --parquet first.parquet --media\n          gen export"
        " out/first --dataset first-images",
    )
    parser.add_argument("folder", metavar="DIR", help="job folder")
    parser.add_argument("--parquet", metavar="FILE", help="write one table of all items")
    parser.add_argument(
        "--media",
        action="store_true",
        help="with --parquet: add the media as a column that load_dataset shows",
    )
    parser.add_argument(
        "--dataset", metavar="DIR", help="write the media, and metadata.jsonl with a row for each"
    )
