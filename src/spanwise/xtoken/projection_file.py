"""Projection files: ours is safetensors with metadata; the dense and sparse ``.pt`` forms are read and written too.

Nothing is unpickled beyond tensors and plain containers (``weights_only=True``), so a shared file cannot run code.
Writing goes to a temporary name first: a file is complete or absent. O(Vs·K).

Shapes: Vs, Vt vocabularies, K entries per row, E entries.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from spanwise.spans.table import token_table, tokenizer_fingerprint
from spanwise.xtoken.projection import Projection, coalesce

FORMAT = "spanwise-projection-1"


def read_projection_file(path: str | os.PathLike[str]) -> tuple[dict[Any, Any], dict[str, str]]:
    """What a file holds: ``{"indices", "likelihoods"}`` or ``{(student, teacher): count}``, and its metadata.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a projection.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no projection file '{file}'; expected one. The path is probably misspelt, or it was never "
            f"built. Fix: spanwise project build STUDENT TEACHER -o {file}"
        )
    content, metadata = _safetensors(file) if _is_safetensors(file) else (_plain_pt(file), {})
    if isinstance(content, Mapping):
        if "indices" in content and "likelihoods" in content:
            indices, likelihoods = content["indices"], content["likelihoods"]
            tensors = isinstance(indices, Tensor) and isinstance(likelihoods, Tensor)
            if tensors and indices.ndim == 2 and indices.shape == likelihoods.shape:
                return {"indices": indices.long(), "likelihoods": likelihoods.float()}, metadata
        elif all(_is_pair(key) and isinstance(count, (int, float, Tensor)) for key, count in content.items()):
            return dict(content), metadata
    raise ValueError(
        f"'{file}' is not in a recognized format for a projection: it holds {_described(content)}; expected indices "
        "and likelihoods of one shape [Vs, K], or a dict of (student id, teacher id) -> count. It is probably "
        f"another file, such as a model. Fix: spanwise project build STUDENT TEACHER -o {file}"
    )


def sparse_entries(content: Mapping[Any, Any]) -> tuple[Int64[Tensor, "2 E"], Float32[Tensor, " E"]]:
    """COO components of either form; -1 sentinels of the dense form are kept."""
    if "indices" in content:
        indices: Tensor = content["indices"]
        rows = torch.arange(len(indices))[:, None].expand_as(indices)
        return torch.stack([rows.reshape(-1), indices.reshape(-1)]), content["likelihoods"].reshape(-1)
    pairs = torch.tensor(list(content), dtype=torch.long).view(-1, 2).t().contiguous()
    return pairs, torch.tensor([float(count) for count in content.values()])


def load_projection(
    path: str | os.PathLike[str], *, student: Any | None = None, teacher: Any | None = None
) -> Projection:
    """Read a projection; refuse it where it was not made for ``student`` and ``teacher``.

    A file without fingerprints is judged by its sizes: rows of a padded head that hold nothing are cut off, and the
    teacher's side becomes as wide as its tokenizer, whatever the largest id in the file.
    """
    content, metadata = read_projection_file(path)
    sides = (("student", student), ("teacher", teacher))
    for side, tokenizer in sides:
        built_for = metadata.get(f"{side}_fingerprint")
        if tokenizer is not None and built_for is not None and built_for != tokenizer_fingerprint(tokenizer):
            raise ValueError(
                f"the projection '{path}' was built for the {side} tokenizer "
                f"'{metadata.get(f'{side}_name', 'unknown')}' and another one is in use "
                f"('{tokenizer_name(tokenizer)}'); expected equal vocabularies. The file probably belongs to another "
                "pair, or the tokenizer was changed since. Rebuild it: spanwise project build STUDENT TEACHER -o "
                f"{path}"
            )
    # What a fingerprint vouches for needs no measuring.
    known = [None if f"{side}_fingerprint" in metadata else tokenizer for side, tokenizer in sides]
    wanted = [None if tokenizer is None else token_table(tokenizer).size for tokenizer in known]
    if "indices" in content:
        indices, likelihoods = content["indices"], content["likelihoods"]
        used = (indices >= 0).any(-1).nonzero()
        students, teachers = len(indices), int(indices.max()) + 1 if indices.numel() else 0
        filled = int(used.max()) + 1 if len(used) else 0
        if _fits(wanted[0], filled, students) and _fits(wanted[1], teachers, None):
            rows = students if wanted[0] is None else wanted[0]
            width = max(int(metadata.get("teacher_vocab_size", 0)), teachers) if wanted[1] is None else wanted[1]
            return Projection(indices[:rows], likelihoods[:rows], width, metadata)
    else:
        (row, column), weights = sparse_entries(content)
        students, teachers = (int(ids.max()) + 1 if len(ids) else 0 for ids in (row, column))
        if _fits(wanted[0], students, None) and _fits(wanted[1], teachers, None):
            width = teachers if wanted[1] is None else wanted[1]
            kept = column >= 0
            entries = coalesce(row[kept], column[kept], weights[kept], width)
            return Projection.of_entries(entries, students if wanted[0] is None else wanted[0], width)
    raise ValueError(
        f"the projection '{path}' is {students:,} × {teachers:,} and the tokenizers have "
        f"{' and '.join('any number of' if size is None else f'{size:,}' for size in wanted)} tokens; expected a row "
        "per student token and no id beyond. It was probably built for other tokenizers. Rebuild it: spanwise project "
        f"build STUDENT TEACHER -o {path}"
    )


def _fits(size: int | None, filled: int, rows: int | None) -> bool:
    """Whether a side of a file fits a tokenizer: nothing beyond its ids, and a row for each where rows are listed."""
    return size is None or (filled <= size and (rows is None or rows >= size))


def save_projection(projection: Projection, path: str | os.PathLike[str]) -> None:
    """Write safetensors, or the dense ``.pt`` form where the path ends with ``.pt``."""
    target = check_target(path)
    tensors = {
        "indices": projection.indices.cpu().to(torch.int32).contiguous(),
        "likelihoods": projection.likelihoods.cpu().contiguous(),
    }
    with _Staged(target) as staging:
        if target.suffix == ".pt":
            torch.save({"indices": tensors["indices"].long(), "likelihoods": tensors["likelihoods"]}, staging)
            return
        from safetensors.torch import save_file

        metadata = {"teacher_vocab_size": str(projection.teacher_vocab_size), **projection.metadata, "format": FORMAT}
        save_file(tensors, staging, metadata)


def save_sparse_projection(projection: Projection, path: str | os.PathLike[str]) -> None:
    """Write the sparse ``.pt`` form: ``{(student id, teacher id): weight}``."""
    entries = projection.entries()
    pairs = zip(entries.student.tolist(), entries.teacher.tolist(), strict=True)
    target = check_target(path)
    with _Staged(target) as staging:
        torch.save(dict(zip(pairs, entries.weight.tolist(), strict=True)), staging)


def check_target(path: str | os.PathLike[str]) -> Path:
    """Where a projection is to be written; refused before any work where that is a folder."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(
            f"the projection was to be written to '{target}', which is a folder; expected a file's name. The name was "
            f"probably left out. Fix: -o {target / 'projection.safetensors'}"
        )
    return target


def tokenizer_name(tokenizer: Any) -> str:
    """What a tokenizer is called: the last part of its name or path."""
    return Path(str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)).name


class _Staged:
    """A path beside the target that takes its place when the block ends well, with the permissions that every new file
    of the user's gets (some writers leave it to its owner alone)."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> str:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.path = f"{self.target}.{secrets.token_hex(4)}.tmp"
        Path(self.path).touch()
        self.permissions = Path(self.path).stat().st_mode
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            Path(self.path).chmod(self.permissions)
            Path(self.path).replace(self.target)
        else:
            Path(self.path).unlink(missing_ok=True)


def _is_pair(key: Any) -> bool:
    """(student id, teacher id), -1 for no teacher token."""
    return (
        isinstance(key, tuple) and len(key) == 2 and all(type(i) is int for i in key) and key[0] >= 0 and key[1] >= -1
    )


def _is_safetensors(file: Path) -> bool:
    with file.open("rb") as handle:
        head = handle.read(9)
    return len(head) == 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size


def _safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    opener: Any = safe_open  # its stubs lack the context manager
    try:
        with opener(str(file), framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}, dict(handle.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"'{file}' begins like safetensors and cannot be read ({error}); expected a whole file. It was probably "
            f"cut off in copying. Fix: copy it again, or spanwise project build STUDENT TEACHER -o {file}"
        ) from error


def _plain_pt(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # read as instructions, the bytes of another kind of file end in any error
        raise ValueError(
            f"'{file}' is not in a recognized format for a projection ({type(error).__name__}); expected safetensors, "
            "or a .pt of tensors and plain containers, since anything else could run code. It is probably damaged, "
            f"or holds pickled objects. Fix: spanwise project build STUDENT TEACHER -o {file}"
        ) from error


def _described(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"keys {[str(key) for key in list(content)[:4]]}"
    return f"a {type(content).__name__}"
