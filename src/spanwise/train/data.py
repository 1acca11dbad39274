"""Rows from files, folders, hub data sets or built-in corpora, indexed or streamed, never all in memory.

Files are read through ``datasets`` (memory-mapped Arrow), so memory does not grow with the corpus; the index of windows
costs 24 bytes each. What is left out (rows without text) is counted by reason. Text documents may be cut into
windows of bytes, at characters.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spanwise.train.builtin import builtin_documents
from spanwise.train.left_out import BLANK_WINDOWS, ROWS_WITHOUT_TEXT, LeftOut, carried
from spanwise.xtoken import rows as kinds

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text", ".md": "text"}


def open_corpus(source: str | Sequence[str], *, stream: bool = False) -> Dataset | IterableDataset:
    """The rows of one source or several.

    Args:
        source: files (``.jsonl .json .parquet .arrow .txt .md``; a text file is one document), folders of such files,
            the name of a hub data set (its ``train`` split, or ``name:split``), or a built-in corpus
            (``builtin:python-docs``, ``builtin:tales``).
        stream: read as a stream; nothing is written to the data-set cache.
    """
    from datasets import Dataset, concatenate_datasets

    sources = [source] if isinstance(source, str) else list(source)
    parts: list[Any] = [_open_one(one, stream=stream) for one in sources]
    if not parts:
        raise ValueError(
            "data.train is an empty list; expected at least one file. The list was probably cleared by an override. "
            "Fix: name a file, a folder or a hub data set."
        )
    joined = parts[0] if len(parts) == 1 else concatenate_datasets(parts)
    if isinstance(joined, Dataset) and len(joined) == 0:
        raise no_rows(", ".join(sources))
    return joined


def no_rows(source: str) -> ValueError:
    """The error of a corpus without rows."""
    return ValueError(
        f"{source} holds no rows; expected at least one. The file is probably empty. Fix: check that the corpus was "
        "written completely."
    )


def _open_one(source: str, *, stream: bool) -> Any:
    from datasets import Dataset, load_dataset

    if source.startswith("builtin:"):
        rows = Dataset.from_list([{"text": text} for text in builtin_documents(source)])
        return rows.to_iterable_dataset() if stream else rows
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in READERS)
        kinds = {READERS[file.suffix] for file in files}
        if len(kinds) != 1:
            raise ValueError(
                f"the folder '{source}' holds files of {len(kinds)} kinds ({', '.join(sorted(kinds)) or 'none'}); "
                f"expected files of one kind out of {', '.join(READERS)}. Fix: name the files themselves."
            )
        return _load(kinds.pop(), [str(file) for file in files], stream)
    if path.is_file():
        if path.suffix not in READERS:
            raise ValueError(
                f"'{source}' ends in '{path.suffix}'; expected one of {', '.join(READERS)}. The reader is chosen by "
                "the ending. Fix: rename the file to what it is, or convert it."
            )
        return _load(READERS[path.suffix], [str(path)], stream)
    if path.suffix in READERS or source.startswith((".", "/")):
        raise FileNotFoundError(
            f"there is no file '{source}'; expected a corpus there. The path is relative to the folder you are in "
            f"({Path.cwd().name}/), and probably meant from elsewhere. Fix: give the full path."
        )
    name, _, split = source.partition(":")
    try:
        return load_dataset(name, split=split or "train", streaming=stream)
    except Exception as error:  # the hub raises many kinds
        raise ValueError(
            f"'{source}' is no file here, and as a hub data set it gave {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}; expected a file, a folder or a data set of the hub. "
            "The path is probably misspelt, or the hub cannot be reached from here. Fix: give the path of a file."
        ) from error


def _load(reader: str, files: list[str], stream: bool) -> Any:
    from datasets import load_dataset

    options: dict[str, Any] = {"sample_by": "document"} if reader == "text" else {}
    try:
        return load_dataset(reader, data_files={"train": files}, split="train", streaming=stream, **options)
    except Exception as error:  # readers raise many kinds for one cause: a file that is not what its name says
        if not any(Path(file).stat().st_size for file in files):
            raise no_rows(", ".join(files)) from error
        raise unreadable(files[0], reader, error) from error


def unreadable(file: str, reader: str, error: Exception) -> ValueError:
    """The error of a file that is not what its name says."""
    cause = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return ValueError(
            f"{file} is no UTF-8 ({cause}); expected text in that encoding. It was probably written in another one. "
            f"Fix: iconv -f ISO-8859-1 -t UTF-8 {file} > NEW, with the name of its encoding."
        )
    first_line = (str(cause).strip() or "no reason given").splitlines()[0]
    # The reader counts blocks of a file, so the line is looked for here where that is cheap.
    line = _first_broken_line(Path(file)) if reader == "json" else None
    where = f"line {line} is no JSON object" if line else f"{type(cause).__name__}: {first_line}"
    return ValueError(
        f"{file} could not be read as {reader} ({where}); expected a complete file of that kind with the same columns "
        f"in every row. It is probably cut off or malformed. Fix: {'correct that line' if line else 'write it again'}."
    )


def _first_broken_line(file: Path) -> int | None:
    """The number of the first line of JSON lines that is no object; None where each is one."""
    if file.suffix != ".jsonl":
        return None
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    return number
                json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
            except ValueError:
                return number
    return None


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str], place: int) -> dict[str, Any]:
    """One row under our names; columns that are not mapped keep theirs.

    >>> rename_columns({"content": "a", "text": "b", "id": 3}, {"text": "content"}, 0)
    {'id': 3, 'text': 'a'}
    """
    missing = [theirs for theirs in columns.values() if theirs not in row]
    if missing:
        raise ValueError(
            f"row {place} has the columns {', '.join(row)}; expected {', '.join(missing)} (from data.columns). The "
            "name is probably misspelt. Fix: data.columns maps our name to the column's name, as in text: content."
        )
    # A column that already has one of our names gives way to the one that was chosen.
    given = {*columns, *columns.values()}
    return {name: value for name, value in row.items() if name not in given} | {
        ours: row[theirs] for ours, theirs in columns.items()
    }


def row_kind(row: Mapping[str, Any], place: int) -> str | None:
    """Which kind of row this is; None for one that has a kind's columns and nothing in them."""
    kind = kinds.row_kind(row)
    if kind is not None:
        for column in kinds.ROW_KINDS[kind]:
            check_kind(row[column], kind, place)
    elif not any(row.keys() >= set(columns) for columns in kinds.ROW_KINDS.values()):
        raise ValueError(
            f"row {place} has the columns {', '.join(row) or 'none'}; expected one of {kinds.KINDS_IN_WORDS}. The text "
            "is probably under another name. Fix: say so in the recipe, as in data.columns.text=content."
        )
    return kind


def of_one_kind(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the columns of the kinds it is not, so that what follows reads the kind that was indexed."""
    own = kinds.ROW_KINDS[kinds.row_kind(row) or "text"]
    others = {column for columns in kinds.ROW_KINDS.values() for column in columns if column not in own}
    return {name: value for name, value in row.items() if name not in others}


def check_kind(value: Any, kind: str, place: int) -> None:
    """Refuse a column that holds something else than its name says."""
    if kind == "text" and not isinstance(value, str):
        raise ValueError(
            f"row {place} has {value!r:.60} under text; expected a string. Another column was probably meant, or a "
            "number was written without quotes. Fix: data.columns.text=NAME names the column that holds the text."
        )
    if kind == "prompt" and not isinstance(value, str):
        raise ValueError(
            f"row {place} has {value!r:.60} under prompt or completion; expected strings. The rows are probably "
            "conversations in two parts. Fix: join the turns of both into one list under messages."
        )
    if kind in ("messages", "message_log"):
        turns = value if isinstance(value, list) else [value]
        needed = "role" if kind == "messages" else "content"
        wrong = next((turn for turn in turns if not isinstance(turn, dict) or turn.get(needed) is None), None)
        if wrong is not None:
            keys = ", ".join(wrong) if isinstance(wrong, dict) else f"{wrong!r:.60}"
            raise ValueError(
                f"row {place} has a turn under {kind} with {keys}; expected a list of turns with role and content. "
                "The chat was probably written in another form (from and value, say), or as JSON text. Fix: rename the "
                "keys of each turn to role and content."
            )


def window_ends(encoded: bytes, window_bytes: int) -> Iterator[int]:
    """Where windows of at most ``window_bytes`` end: at characters, and behind a blank where one is near."""
    start = 0
    while start < len(encoded):
        end = min(start + window_bytes, len(encoded))
        if end < len(encoded):
            blank = encoded.rfind(b" ", start + (3 * window_bytes) // 4, end)
            end = blank + 1 if blank > start else end
            while encoded[end] & 0xC0 == 0x80:
                end -= 1
        yield end
        start = end


def text_windows(text: str, window_bytes: int) -> list[str]:
    """Cut a text into windows; joined they give the text.

    >>> text_windows("one two three", 8)
    ['one two ', 'three']
    """
    encoded = text.encode("utf-8", errors="surrogatepass")
    ends = window_ends(encoded, window_bytes)
    return [encoded[start:end].decode("utf-8", errors="surrogatepass") for start, end in pairwise([0, *ends])]


class IndexedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a memory-mapped corpus, text documents cut into windows. O(windows) int64 memory.

    Attributes:
        left_out: rows that hold nothing to train on, by reason.
    """

    def __init__(self, corpus: Dataset, *, columns: Mapping[str, str], window_bytes: int | None) -> None:
        self.corpus = corpus
        self.columns = dict(columns)
        self.window_bytes = window_bytes
        self.left_out = LeftOut()
        self._index = self._build_index()
        if not len(self._index):
            raise ValueError(
                f"the corpus has {len(corpus)} rows and none holds text (left out: {self.left_out}); expected at least "
                "one row to train on. The text is probably under another name. Fix: set data.columns."
            )

    def _build_index(self) -> np.ndarray:
        entries = array("q")  # as it is kept: rows of a list would cost seven times as much
        for place in range(len(self.corpus)):
            row = rename_columns(self.corpus[place], self.columns, place)
            kind = row_kind(row, place)
            if is_empty(row, kind):
                self.left_out.reasons[ROWS_WITHOUT_TEXT] += 1
            elif kind == "text" and self.window_bytes:
                encoded = row["text"].encode("utf-8", errors="surrogatepass")
                for start, end in pairwise(chain([0], window_ends(encoded, self.window_bytes))):
                    if encoded[start:end].strip():
                        entries.extend((place, start, end))
                    else:
                        self.left_out.reasons[BLANK_WINDOWS] += 1
            else:
                entries.extend((place, 0, -1))
        if self.left_out.reasons:
            logger.warning("left out of training: %s", self.left_out)
        return np.frombuffer(entries, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        document, start, end = (int(part) for part in self._index[index])
        row = of_one_kind(rename_columns(self.corpus[document], self.columns, document))
        if end >= 0:
            encoded = row["text"].encode("utf-8", errors="surrogatepass")
            row["text"] = encoded[start:end].decode("utf-8", errors="surrogatepass")
        return {"idx": index, "loss_multiplier": 1.0} | row

    def lengths(self) -> list[int]:
        """Bytes (or tokens, for tokenised rows) of every row, for grouping rows of like length."""
        return [
            end - start if end >= 0 else row_length(self[place])
            for place, (_, start, end) in enumerate(map(np.ndarray.tolist, self._index))
        ]


class StreamedRows(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The same rows from a stream, shuffled within a buffer; ``set_epoch`` reshuffles.

    Attributes:
        left_out: nothing; what a stream leaves out is known when it is read, and its rows carry it.
    """

    def __init__(
        self,
        corpus: IterableDataset,
        *,
        columns: Mapping[str, str],
        window_bytes: int | None,
        shuffle_buffer: int,
        seed: int,
    ) -> None:
        self.columns = dict(columns)
        self.window_bytes = window_bytes
        self.left_out = LeftOut()
        self.corpus, self.shuffle_buffer, self.seed, self.epoch = corpus, shuffle_buffer, seed, 0
        self._refuse_without_text(corpus)

    def _refuse_without_text(self, corpus: Iterable[Any]) -> None:
        """Read up to the first row that can be trained on: a stream of none would train nothing and say nothing."""
        found = LeftOut()
        for row in self._rows_and_reasons(corpus):
            if not isinstance(row, str):
                return
            found.reasons[row] += 1
        raise ValueError(
            f"the stream holds no text (left out: {found}); expected at least one row to train on. The files are "
            "probably empty, or the text is under another name. Fix: check them, or set data.columns."
        )

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently in each epoch.

        Each reader counts its own: the epoch of a data set of ``datasets`` is one number for all reading processes.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        shuffled = self.corpus.shuffle(seed=self.seed + 1_000_003 * self.epoch, buffer_size=self.shuffle_buffer)
        for place, row in enumerate(carried(self._rows_and_reasons(shuffled))):
            yield {"idx": place, "loss_multiplier": 1.0} | row

    def _rows_and_reasons(self, corpus: Iterable[Any]) -> Iterator[dict[str, Any] | str]:
        """Every row, or the reason why it is left out."""
        for document, raw in enumerate(readable(corpus)):
            row = rename_columns(raw, self.columns, document)
            kind = row_kind(row, document)
            if is_empty(row, kind):
                yield ROWS_WITHOUT_TEXT
            elif kind == "text" and self.window_bytes:
                for window in text_windows(row["text"], self.window_bytes):
                    yield of_one_kind(row) | {"text": window} if window.strip() else BLANK_WINDOWS
            else:
                yield of_one_kind(row)


def readable(corpus: Iterable[Any]) -> Iterator[Any]:
    """The rows of a stream, whose files are only read now; what breaks is said as where a whole file is read."""
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowException

    try:
        yield from corpus
    except (ArrowException, DatasetGenerationError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the corpus could not be read on ({type(error).__name__}: {str(error).splitlines()[0]}); expected "
            "complete files in UTF-8 with the same columns in every row. One is probably cut off or malformed. "
            "Fix: read it once as data.train without data.stream, which names the line."
        ) from error


def is_empty(row: Mapping[str, Any], kind: str | None) -> bool:
    """True where a row holds nothing that could be trained on."""
    if kind is None:
        return True
    content = row[kinds.ROW_KINDS[kind][-1]]  # of a prompt, its completion
    return not (content.strip() if isinstance(content, str) else len(content))


def row_length(row: Mapping[str, Any]) -> int:
    """The size of a row's content: bytes of its text, or tokens."""
    if "input_ids" in row:
        return len(row["input_ids"])
    content: Any = row.get("text") or row.get("messages") or row.get("message_log") or row.get("conversation")
    if content is None:
        content = [row.get("prompt"), row.get("completion")]
    return len(str(content).encode("utf-8", errors="surrogatepass"))


def turn_text(turn: Mapping[str, Any]) -> str:
    """What a turn of a chat says: of a list of parts their text, of a turn without content nothing.

    >>> turn_text({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]})
    'what?'
    """
    content = turn.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)
