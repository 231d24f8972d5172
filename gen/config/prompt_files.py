"""Files of prompts: .txt (a prompt per line), .jsonl (an object or a text per line), .csv, .tsv
and .parquet (columns by name); all but Parquet may be compressed (.gz).

Everything is read as it streams by, within bounds: a small file may unpack to terabytes, or to one
row that fills the memory. A reader yields the line, what it holds, its text, and what is
wrong with it; `gen.config.inputs` makes rows of them.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from gen.config.condition_rows import CONDITION_KEYS
from gen.config.foreign import is_known, missing_prompt
from gen.config.rows import ROW_NODES, nested
from gen.config.yaml_text import DEEPEST, load_yaml
from gen.core.errors import GenError, shown, unknown
from gen.core.paths import is_file

LONGEST_LINE = 32 << 20  # bytes; of a row of a Parquet file, those of one text
MOST_LINES = 20_000_000  # of a file, blank ones included
MOST_UNPACKED = 8 << 30  # bytes of a compressed file
MOST_GROUP = 1 << 30  # bytes of the rows of a Parquet file that are read together
MOST_VALUES = 1 << 26  # values of a column in such a group
Read = tuple[int, Any, str, str | None]
INTEGERS = ("seed", "num_samples", "frames")
INTEGER = re.compile(r"[-+]?[0-9]{1,40}")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def prompt_paths(path: str | Path) -> list[Path]:
    """Find the files that a name or a pattern such as ``data/*.jsonl`` stands for, in order."""
    if is_file(path):
        return [Path(path)]
    if not has_magic(str(path)):
        return []
    return sorted(Path(p) for p in glob(str(path), recursive=True) if is_file(p))


def read_values(path: Path, column: str | None = None) -> Iterator[Read]:
    """Read the rows of one file.

    Args:
        path: the file.
        column: the column that holds the prompt; None for ``prompt``.

    Yields:
        Line, values or None, text of the line, error or None.

    Raises:
        GenError: a file of no use as a whole.
    """
    readers: dict[str, Callable[..., Iterator[Read]]] = {
        ".txt": _text,
        ".jsonl": _jsonl,
        ".csv": _csv,
        ".tsv": partial(_csv, delimiter="\t"),
        ".parquet": _parquet,
    }
    is_packed = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if is_packed else path).suffix.lower()
    if suffix not in readers or (is_packed and suffix == ".parquet"):
        raise GenError(
            f"{path} is not a supported prompt file; expected a name that ends in"
            f" {', '.join(readers)}, or one of the first four and .gz"
        )
    if suffix == ".txt" and column is not None:
        raise GenError(f"prompt_column is given for {path}, which has no columns; expected none")
    options = {} if suffix in (".txt", ".jsonl") else {"column": column}
    try:
        yield from readers[suffix](path, **options)
    except (OSError, EOFError, zlib.error) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise GenError(f"{path} cannot be read: {' '.join(str(said).split())}") from error


def _opened(path: Path) -> IO[bytes]:
    """Open a file of lines, compressed or not."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _bounded(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines. Raises ``GenError`` for one that is longer than a row can be, and for more of
    them than a job can have."""
    number = unpacked = 0
    most = MOST_UNPACKED if isinstance(file, gzip.GzipFile) else math.inf
    while line := file.readline(LONGEST_LINE + 1):
        number, unpacked = number + 1, unpacked + len(line)
        if len(line) > LONGEST_LINE:
            raise GenError(
                f"{path}, line {number} is longer than {LONGEST_LINE:,} bytes; expected a row per"
                " line"
            )
        if number > MOST_LINES:
            raise GenError(f"{path} has more than {MOST_LINES:,} lines; expected at most so many")
        if unpacked > most:
            raise GenError(f"{path} unpacks to more than {most:,} bytes; expected at most so many")
        yield line


def _lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Lines that are not blank. They end at line feeds alone: other separators may stand inside a
    prompt."""
    with _opened(path) as file:
        for number, line in enumerate(_bounded(path, file), 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                yield number, line.decode().strip(), None
            except UnicodeDecodeError as error:
                yield (
                    number,
                    line.decode(errors="backslashreplace").strip(),
                    f"no UTF-8 text ({error.reason} at byte {error.start + 1})",
                )


def _text(path: Path) -> Iterator[Read]:
    for number, line, error in _lines(path):
        yield number, line, line, error


def _jsonl(path: Path) -> Iterator[Read]:
    for number, line, error in _lines(path):
        got = None
        try:
            got = json.loads(line, object_pairs_hook=_unique) if error is None else None
        except GenError as problem:
            error = str(problem)
        except json.JSONDecodeError as problem:
            error = f"no JSON ({problem.msg} at column {problem.colno})"
        except RecursionError:
            error = f"no JSON that can be read (it nests more than {DEEPEST} deep)"
        except ValueError as problem:  # a number of thousands of digits
            error = f"no JSON that can be read ({problem})"
        yield number, got, line, error


def _repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise GenError(f"key {shown(_repeated(k for k, _ in pairs))} comes twice")
    return tree


def _csv(path: Path, column: str | None = None, delimiter: str = ",") -> Iterator[Read]:
    taken: list[str] = []  # the lines of the row being read

    def lines(file):
        for number, line in enumerate(_bounded(path, file)):
            raw = line if number else line.removeprefix(codecs.BOM_UTF8)
            taken.append(raw.decode(errors="surrogateescape"))
            yield taken[-1]

    with _opened(path) as file:
        reader = csv.reader(lines(file), strict=True, delimiter=delimiter)
        header: list[str] | None = None
        while True:
            taken.clear()
            number, cells, error = reader.line_num + 1, [], None
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as problem:
                if "unexpected end" in str(problem):  # then no later row can be told from this one
                    raise GenError(
                        f"{path}, line {number}: a quote is opened and never closed"
                    ) from None
                error = f"no CSV ({problem})"
            raw = "".join(taken)
            if not raw.isascii():
                try:
                    raw.encode()
                except UnicodeEncodeError:
                    raw = raw.encode(errors="surrogateescape").decode(errors="backslashreplace")
                    error = error or "no UTF-8 text"
            if header is None:
                header = _columns(cells, path, column) if error is None else _no_header(path, error)
            elif error or any(c.strip() for c in cells):
                if not error and len(cells) != len(header):
                    error = (
                        f"the number of cells is {len(cells)}; expected {len(header)}, the columns"
                    )
                yield number, None if error else _typed(header, cells), raw.strip(), error


def _no_header(path: Path, error: str) -> list[str]:
    raise GenError(f"{path} has no readable header: {error}")


def _columns(names: Sequence[str], path: Path, column: str | None) -> list[str]:
    """Return the columns of a table, one of which holds the prompts."""
    names = [str(n).strip() for n in names]
    twice = _repeated(names)
    try:
        if twice is not None:
            raise GenError(f"column {shown(twice)} comes twice")
        nested({name: None for name in names if is_known(name)})
        if column is not None and column not in names:
            raise unknown("column", column, names)
        if column is None and not {"prompt", *CONDITION_KEYS} & set(names):
            raise GenError(missing_prompt(names))
    except GenError as error:
        raise GenError(f"{path}, header: {error}") from None
    return names


def _typed(header: list[str], cells: list[str]) -> dict[str, Any]:
    """Cells as values; an empty one says nothing. Texts stay texts, meta included, since a table
    does not say what else they are."""
    out = {}
    for key, cell in zip(header, cells, strict=True):
        if cell.strip():
            param = is_known(key) and (
                key in INTEGERS
                or key.partition(".")[0] in ("sampler", "sampling")
                or key in ROW_NODES
                or (key in CONDITION_KEYS and cell.lstrip().startswith(("[", "{")))
            )
            out[key] = _whole(key, scalar(cell.strip())) if param else cell
    return out


def _whole(key: str, value: Any) -> Any:
    """Tables with gaps hold whole numbers as floats."""
    return (
        int(value) if key in INTEGERS and isinstance(value, float) and value.is_integer() else value
    )


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    try:
        value = load_yaml(text)
    except GenError:
        return text
    return value if value is None or isinstance(value, (bool, int, float, list, dict)) else text


def scalar(text: str) -> Any:
    """Parse a cell as YAML does, with ``1e-4`` as the number it looks like."""
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else _parsed(text)


def _parquet(path: Path, column: str | None = None) -> Iterator[Read]:
    try:
        import pyarrow.parquet  # optional: the extra "parquet"
    except ImportError as error:
        raise GenError(
            f'reading {path} needs pyarrow: pip install "gen-toolkit[parquet]"'
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            _require_small_groups(path, file.metadata)
        # a text that all rows share is held once, as in the file
        texts = [f.name for f in schema if pyarrow.types.is_string(f.type)]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            names, number = _columns(schema.names, path, column), 0
            for batch in file.iter_batches(batch_size=1024):
                _require_short_texts(path, batch, number)
                columns = (map(_plain, column) for column in batch.columns)
                for cells in zip(*columns, strict=True):
                    number += 1
                    values = {
                        k: _whole(k, _without_gaps(v))
                        for k, v in zip(names, cells, strict=True)
                        if v is not None
                    }
                    yield number, values, json.dumps(values, ensure_ascii=False, default=str), None
    except (GenError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise GenError(
            f"{path} is not a readable Parquet file: {' '.join(str(error).split())}"
        ) from error


def _require_small_groups(path: Path, metadata: Any) -> None:
    """Raise ``GenError`` for a group of rows that is too large to be read."""
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        columns = [group.column(c) for c in range(group.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns)
        if size > MOST_GROUP:
            raise GenError(
                f"{path}, row group {g} holds {size:,} bytes; expected at most {MOST_GROUP:,}"
            )
        for column in columns:
            if column.num_values > MOST_VALUES:
                raise GenError(
                    f"{path}, row group {g} holds {column.num_values:,} values of"
                    f" {column.path_in_schema}; expected at most {MOST_VALUES:,}"
                )


def _require_short_texts(path: Path, batch: Any, before: int) -> None:
    """Raise ``GenError`` for a text that is longer than a row can be, in the rows after ``before``
    others."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        texts = getattr(column, "dictionary", ())
        longest = max((len(text.as_buffer() or b"") for text in texts if text.is_valid), default=0)
        if longest > LONGEST_LINE:
            raise GenError(
                f"{path} has a text of {longest:,} bytes as {name} after row {before}; expected at"
                f" most {LONGEST_LINE:,}"
            )


def _plain(value: Any) -> Any:
    """Return a value of Arrow as one of Python."""
    return value.as_py()


def _without_gaps(value: Any) -> Any:
    """Drop null fields of a struct: it has the fields of all rows."""
    return (
        {k: _without_gaps(v) for k, v in value.items() if v is not None}
        if isinstance(value, dict)
        else value
    )
