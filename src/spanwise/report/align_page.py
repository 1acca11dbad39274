"""What ``spanwise align`` shows: chunks of both sides in matching colours, on a page and in the terminal. O(tokens)."""

from __future__ import annotations

import os
from pathlib import Path

from spanwise.loading import load_tokenizer
from spanwise.report.columns import COLOURS, STYLE, box, piece, visible
from spanwise.report.page import section, table, write_page
from spanwise.xtoken.show import ShownAlignment, ShownChunk, align_text


def write_align_page(path: str | os.PathLike[str], found: ShownAlignment, *, student: str, teacher: str) -> Path:
    """Write the page of one alignment; ``student`` and ``teacher`` are how the tokenizers are called."""
    correct = sum(chunk.correct for chunk in found.chunks)
    facts = table(
        ("", ""),
        [
            ("student tokens in a correct chunk", f"{100 * found.coverage:.1f} %"),
            ("quality", found.quality),
            ("chunks", len(found.chunks)),
            ("correct", correct),
        ],
    )
    body = section("Coverage", facts)
    body += section(
        "Chunks",
        "<p>Above the student's tokens, below the teacher's. A red frame is not claimed.</p>" + chunk_boxes(found),
    )
    worst = found.worst()
    if worst:
        rows = [
            (_plain(c.student_pieces), _plain(c.teacher_pieces), "correct" if c.correct else "not paired")
            for c in worst
        ]
        body += section("Worst places", table(("student", "teacher", "what"), rows))
    return write_page(path, title=f"{student} and {teacher}", subtitle="Alignment by bytes", body=body, style=STYLE)


def chunk_boxes(found: ShownAlignment) -> str:
    """The chunks in order, each a box of two sides, as HTML; a page that shows them takes ``columns.STYLE``."""
    return f'<div class="chunks">{"".join(_chunk(place, chunk) for place, chunk in enumerate(found.chunks))}</div>'


def _chunk(place: int, chunk: ShownChunk) -> str:
    kind = f"c{place % COLOURS}" if chunk.correct else "wrong"
    sides = ["".join(piece(text) for text in pieces) or "–" for pieces in (chunk.student_pieces, chunk.teacher_pieces)]
    return box(sides, kind)


SAMPLE = "Tokenizers differ: 12345 tokens, naïve café, 日本語, 👩‍🚀 and\n\tsome_code(x=1)."
_TERMINAL_COLOURS = ("cyan", "yellow", "green", "magenta")


def align_and_report(
    student: str, teacher: str, *, text: str | None, file: str | None, html: str | None, in_colour: bool
) -> ShownAlignment:
    """Load both tokenizers, align a text, and show it: in colour on standard output, and as a page if asked."""
    if text is not None and file is not None:
        raise ValueError(
            "both --text and --file were given; expected one of them. One of the two was probably left from another "
            "call. Fix: drop one."
        )
    whole = (SAMPLE if text is None else text) if file is None else _read(file)
    found = align_text(load_tokenizer(student), load_tokenizer(teacher), whole)
    if html is not None:
        write_align_page(html, found, student=student, teacher=teacher)
    if in_colour:
        _print(found)
    return found


def _read(file: str) -> str:
    """A file's text as it is, line ends included."""
    try:
        return Path(file).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{file}' holds bytes that are no UTF-8 (byte {error.start}); expected a text file. It was probably "
            f"written in another encoding. Fix: iconv -f ISO-8859-1 -t UTF-8 '{file}' > NEW, with the name of its "
            "encoding."
        ) from error
    except OSError as error:
        raise ValueError(
            f"'{file}' cannot be read ({error.strerror}); expected a text file. The path is probably misspelt, or that "
            "of a folder. Fix: check it with ls, or give the text itself with --text."
        ) from error


def _print(found: ShownAlignment) -> None:
    """Both sides in matching colours, a line each; what is not claimed in red."""
    from rich.console import Console
    from rich.text import Text

    lines = {"student ": Text(), "teacher ": Text()}
    for place, chunk in enumerate(found.chunks):
        style = f"black on {_TERMINAL_COLOURS[place % 4]}" if chunk.correct else "white on red"
        for line, pieces in zip(lines.values(), (chunk.student_pieces, chunk.teacher_pieces), strict=True):
            line.append("|".join(visible(piece) for piece in pieces), style=style)
            line.append(" ")
    console = Console()
    for name, line in lines.items():
        console.print(Text(name, style="bold") + line)
    console.print(f"coverage {100 * found.coverage:.1f} %, quality {found.quality}, {len(found.chunks)} chunks")
    for chunk in found.worst():
        what = "correct" if chunk.correct else "not paired"
        console.print(Text(f"  {what}: {_plain(chunk.student_pieces)}  ↔  {_plain(chunk.teacher_pieces)}"))


def _plain(pieces: list[str]) -> str:
    return " | ".join(visible(piece) for piece in pieces) or "–"
