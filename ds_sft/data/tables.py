"""Parquet files and `datasets` data sets -> batches of rows.

Owns tables: a few rows at a time as Arrow's own bytes, which workers turn into Python objects, each
column by its type. A null field of a struct is a key that is not there: a table gives every struct
the fields of all of them, so that whether a key was absent or null is lost. Bytes are read
as text; a value that JSON lacks (a time, a decimal) stays as it is, for its reader to refuse.

pyarrow and datasets are imported only when a table is opened. Left to others: rows (`rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds_sft.data.packed import file_sha256
from ds_sft.data.records import Reject, Rejected, strict_json
from ds_sft.data.shapes import KEYS
from ds_sft.data.sources import USUAL_RATIO, printable
from ds_sft.errors import DataError

BATCH_ROWS = 256


class ParquetSource:
    """The rows of one Parquet file, batch by batch."""

    def __init__(self, path: Path, columns: frozenset[str] = frozenset()) -> None:
        """`columns` are read beside those that shapes know. Raises DataError."""
        _need("pyarrow", "a .parquet file")
        self.path = path
        self.name = printable(path)
        self._columns = columns
        self.sha256 = ""
        with self._guard("the file's end"):
            file = self._open()
            self.num_lines = int(file.metadata.num_rows)
            file.close()
        self.size = path.stat().st_size
        self.text_size = self.size * USUAL_RATIO

    def batches(self) -> Iterator[Any]:
        """Record batches of at most BATCH_ROWS rows. Raises DataError with the row group."""
        file = self._open()
        names = _wanted(file.schema_arrow.names, self._columns)
        for group in range(file.num_row_groups):
            with self._guard(f"row group {group}"):
                yield from file.iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
                )
        file.close()
        self.sha256 = file_sha256(self.path)

    def count_rows(self) -> int:
        return self.num_lines

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the file, once it is read."""
        return {
            "path": self.name,
            "bytes": self.size,
            "lines": self.num_lines,
            "sha256": self.sha256,
        }

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path, pre_buffer=False, page_checksum_verification=True)

    def _guard(self, place: str) -> _Guard:
        return _Guard(f"{self.name}, {place}")


class _Guard:
    """Turns what pyarrow raises for a damaged file into one line."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        import pyarrow as pa

        if isinstance(error, pa.ArrowException | OSError):
            reason = " ".join(str(error).split())[:160]
            raise DataError(
                f"{self._where} cannot be read ({reason}): get the file again"
            ) from None


class DatasetSource:
    """The rows of one split of a Hub data set, or of a `save_to_disk` directory."""

    def __init__(self, where: str, split: str, subset: str, columns: frozenset[str]) -> None:
        """Raises DataError if there is no such data set, split or subset."""
        _need("datasets", f"--input {where}")
        self.name = where
        self.is_on_hub = not Path(where).is_dir()
        self._data = _load_dataset(where, split, subset)
        self._split = split
        self._columns = columns
        self.num_lines = len(self._data)
        self.size = self.text_size = int(self._data.data.nbytes)

    def batches(self) -> Iterator[Any]:
        """Record batches of at most BATCH_ROWS rows."""
        names = _wanted(self._data.column_names, self._columns)
        data = self._data.select_columns(names).with_format("arrow")
        for table in data.iter(batch_size=BATCH_ROWS):
            yield from table.combine_chunks().to_batches()

    def count_rows(self) -> int:
        return self.num_lines

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the data set."""
        fingerprint = str(self._data._fingerprint)
        return {
            "path": self.name,
            "split": str(self._data.split or self._split),
            "lines": self.num_lines,
            "fingerprint": fingerprint,
        }


def _load_dataset(where: str, split: str, subset: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        if not Path(where).is_dir():
            return datasets.load_dataset(where, subset or None, split=split)
        found = datasets.load_from_disk(where)
    # Whatever is wrong with the files, the name or the network, the person needs the same line.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"--input {where} cannot be loaded as a data set ({type(error).__name__}: {reason}): "
            "check the name (no such file is here), --split and --subset"
        ) from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(f"--input {where} has no split {split}: choose of {', '.join(found)}")
        return found[split]
    if split not in ("train", str(found.split)):
        raise DataError(f"--input {where} is one split, not several: drop --split {split}")
    return found


def _need(package: str, what: str) -> None:
    try:
        __import__(package)
    except ImportError:
        raise DataError(f"{what} needs `pip install {package}`") from None


def _wanted(names: list[str], columns: frozenset[str]) -> list[str]:
    """The columns that some shape reads; all if there is none, so that they can be named."""
    return [name for name in names if name in KEYS or name in columns] or list(names)


TableSource = ParquetSource | DatasetSource


# --- Arrow's bytes for the workers, Python objects from them ---


def some(batch: Any, chosen: Any) -> Any:
    """The chosen rows of a record batch; `chosen` is a boolean array."""
    import pyarrow as pa

    return batch.filter(pa.array(chosen))


def to_bytes(batch: Any) -> bytes:
    """A record batch as Arrow's stream format."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    whole: bytes = sink.getvalue().to_pybytes()
    return whole


def to_rows(data: bytes) -> list[dict[str, Any] | Rejected]:
    """The rows of a batch as Python objects; a row that cannot be one is rejected."""
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        table = stream.read_all()
    plain = _struct_reader([(field.name, field.type) for field in table.schema])
    try:
        found: list[Any] = table.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError, pa.ArrowException):  # of one row; the others are fine
        found = [_only_row(table.slice(number, 1)) for number in range(table.num_rows)]
    return [row if isinstance(row, Rejected) else _plain_row(row, plain) for row in found]


def _plain_row(row: dict[str, Any], plain: _Reader) -> dict[str, Any] | Rejected:
    try:
        found: dict[str, Any] = plain(row)
    except Reject as reject:
        return reject.rejected
    return found


def _only_row(table: Any) -> dict[str, Any] | Rejected:
    """The row of a table of one; text that is no UTF-8 or a time that Python lacks rejects it."""
    import pyarrow as pa

    try:
        (row,) = table.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError as error:
        return Reject("not_utf8", f"byte {error.start} of a text: {error.reason}").rejected
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return Reject("value_unreadable", str(error)).rejected
    found: dict[str, Any] = row
    return found


_Reader = Callable[[Any], Any]


def _reader(kind: Any) -> _Reader:
    """How to read a value of an Arrow type in JSON's terms."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        is_json = kind.extension_name == "arrow.json"
        return _parsed if is_json else _reader(kind.storage_type)
    if types.is_struct(kind):
        return _struct_reader([(field.name, field.type) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _list_reader(_reader(kind.value_type))
    if types.is_map(kind):
        return _map_reader(_reader(kind.item_type))
    if types.is_floating(kind):
        return _number
    if types.is_dictionary(kind):
        return _reader(kind.value_type)
    return _decoded


def _struct_reader(fields: list[tuple[str, Any]]) -> _Reader:
    readers = [(name, _reader(kind)) for name, kind in fields]
    return lambda value: {
        name: read(value[name]) for name, read in readers if value[name] is not None
    }


def _list_reader(read: _Reader) -> _Reader:
    return lambda values: [None if value is None else read(value) for value in values]


def _map_reader(read: _Reader) -> _Reader:
    return lambda whole: {
        str(_decoded(key)): read(value) for key, value in whole.items() if value is not None
    }


def _decoded(value: Any) -> Any:
    """Bytes as the text that they are, if they are UTF-8; any other value as it is."""
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise Reject("nan_or_infinity", f"{value} is no JSON number")
    return value


def _parsed(text: str) -> Any:
    try:
        return strict_json(text)
    except ValueError as error:
        raise Reject("not_json", str(error)) from None
