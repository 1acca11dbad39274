"""Projection files: ours is safetensors with metadata; the dense and sparse ``.pt`` forms are read and written too.

Nothing is unpickled beyond tensors and plain containers (``weights_only=True``), so a shared file cannot run code.
Writing goes to a temporary name first: a file is complete or absent. O(Vs·K).

Shapes: Vs, Vt vocabularies, K entries per row, E entries.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from spanwise.spans.table import tokenizer_fingerprint
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
        elif all(isinstance(key, tuple) and len(key) == 2 for key in content):
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
    """Read a projection; refuse it where its fingerprints are not those of ``student`` and ``teacher``."""
    content, metadata = read_projection_file(path)
    for side, tokenizer in (("student", student), ("teacher", teacher)):
        built_for = metadata.get(f"{side}_fingerprint")
        if tokenizer is not None and built_for is not None and built_for != tokenizer_fingerprint(tokenizer):
            raise ValueError(
                f"the projection '{path}' was built for the {side} tokenizer "
                f"'{metadata.get(f'{side}_name', 'unknown')}' and another one is in use "
                f"('{tokenizer_name(tokenizer)}'); expected equal vocabularies. The file probably belongs to another "
                "pair, or the tokenizer was changed since. Rebuild it: spanwise project build STUDENT TEACHER -o "
                f"{path}"
            )
    teacher_size = int(metadata.get("teacher_vocab_size", 0))
    if "indices" in content:
        indices = content["indices"]
        largest = int(indices.max()) + 1 if indices.numel() else 0
        return Projection(indices, content["likelihoods"], max(teacher_size, largest), metadata)
    (rows, columns), weights = sparse_entries(content)
    sizes = (int(rows.max()) + 1 if len(rows) else 0, int(columns.max()) + 1 if len(columns) else 0)
    kept = columns >= 0
    return Projection.of_entries(coalesce(rows[kept], columns[kept], weights[kept], sizes[1]), *sizes)


def save_projection(projection: Projection, path: str | os.PathLike[str]) -> None:
    """Write safetensors, or the dense ``.pt`` form where the path ends with ``.pt``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
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
    target = Path(path)
    with _Staged(target) as staging:
        torch.save(dict(zip(pairs, entries.weight.tolist(), strict=True)), staging)


def tokenizer_name(tokenizer: Any) -> str:
    """What a tokenizer is called: the last part of its name or path."""
    return Path(str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)).name


class _Staged:
    """A path beside the target that takes its place when the block ends well."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> str:
        handle, self.path = tempfile.mkstemp(dir=self.target.parent, prefix=self.target.name, suffix=".tmp")
        os.close(handle)
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            Path(self.path).replace(self.target)
        else:
            Path(self.path).unlink(missing_ok=True)


def _is_safetensors(file: Path) -> bool:
    with file.open("rb") as handle:
        head = handle.read(9)
    return len(head) == 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size


def _safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    opener: Any = safe_open  # its stubs lack the context manager
    with opener(str(file), framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}, dict(handle.metadata() or {})  # noqa: SIM118


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
