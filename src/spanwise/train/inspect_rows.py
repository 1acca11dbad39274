"""From a collated batch to rows that can be shown: one function per task. O(tokens).

Nothing is computed anew: what is shown as trained on, hidden, paired or padding is read from the batch's own tensors.

Shapes: S student tokens, T teacher tokens, P pairs of one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from spanwise.report.inspect_page import Kind, ShownColumn, ShownRow, ShownStrip, ShownToken, State, data_uri
from spanwise.spans.chat import IGNORE_INDEX
from spanwise.spans.table import special_ids, token_table
from spanwise.vlm.media import copied_in_rgb, gather
from spanwise.vlm.tokens import is_media_token
from spanwise.xtoken.show import chunk_runs

PADDING = "padding"


def distill_rows(task: Any, rows: list[dict[str, Any]], batch: Mapping[str, Any]) -> list[ShownRow]:
    """The student's tokens over each teacher's, by chunk; alone where no teacher has another tokenizer."""
    student = _pieces(task.processing_class)
    active = [one for one in task.taught if one.aligner is not None]
    teachers = {one.index: _pieces(one.teacher_tokenizer) for one in active}
    trained = batch.get("loss_mask", batch["token_mask"])
    found = []
    for row in range(len(batch["input_ids"])):
        mask, documents = batch["token_mask"][row], _documents(batch, row, "")
        kinds = _kinds(mask, trained[row])
        tokens = [
            ShownToken(student(token), kind)
            for token, kind in zip(batch["input_ids"][row].tolist(), kinds, strict=True)
        ]
        counts: dict[str, object] = {
            "tokens": int(mask.sum()),
            "trained on": int((trained[row] * mask).sum()),
            PADDING: int((mask == 0).sum()),
            "documents": max(documents, default=0),
        }
        strips = [ShownStrip("student", "", _alone(tokens, documents))] if not active else []
        for one in active:
            strip, coverage = _strip(task, batch, row, one, tokens, documents, teachers[one.index])
            strips.append(strip)
            counts |= {f"{name}, teacher {one.index}": value for name, value in coverage.items()}
        found.append(ShownRow("", counts, strips))
    return found


def _strip(
    task: Any,
    batch: Mapping[str, Any],
    row: int,
    one: Any,
    tokens: list[ShownToken],
    documents: list[int],
    piece: Callable[[int], str],
) -> tuple[ShownStrip, dict[str, object]]:
    prefix, alignment = f"teacher_{one.index}_", f"alignment_{one.index}_"
    mask, theirs_in = batch[f"{prefix}token_mask"][row], _documents(batch, row, prefix)
    teacher_tokens = [
        ShownToken(piece(token), "given" if real else PADDING)
        for token, real in zip(batch[f"{prefix}input_ids"][row].tolist(), mask.tolist(), strict=True)
    ]
    mine = batch[f"{alignment}student_chunk_id"][row].tolist()
    theirs = batch[f"{alignment}teacher_chunk_id"][row].tolist()
    correct, valid = (batch[f"{alignment}pair_{name}"][row].tolist() for name in ("is_correct", "valid"))
    shown: list[ShownColumn] = []
    for document in [*range(1, max(documents, default=0) + 1), 0]:
        above = [place for place, number in enumerate(documents) if number == document]
        below = [place for place, number in enumerate(theirs_in) if number == document]
        if document == 0:
            shown += _padding(len(above), len(below))
            continue
        for pair, upper, lower in chunk_runs([mine[i] for i in above], [theirs[j] for j in below]):
            own = tuple(tokens[above[i]] for i in range(*upper))
            state: State = "paired" if pair >= 0 and correct[pair] else "wrong"
            if (pair >= 0 and not valid[pair]) or (own and all(token.kind == "given" for token in own)):
                state = "unused"
            state = state if own else "alone"
            other = tuple(teacher_tokens[below[j]] for j in range(*lower))
            shown.append(ShownColumn(own, other, state, document))
    inside = sum(chunk >= 0 and correct[chunk] for chunk in mine)
    real = int(batch["token_mask"][row].sum())
    counts: dict[str, object] = {
        "tokens": int(mask.sum()),
        "chunks": int(batch[f"{alignment}num_chunks"][row]),
        "% in a correct chunk": 100 * inside / real if real else 100.0,
    }
    section = task.recipe.teachers[one.index]
    return ShownStrip("student", f"teacher {one.index}: {section.source} ({section.loss.name})", shown), counts


def masked_rows(task: Any, rows: list[dict[str, Any]], batch: Mapping[str, Any]) -> list[ShownRow]:
    """What the model is given over what is hidden there."""
    tokenizer = task.processing_class
    piece = _decoded(tokenizer)
    found = []
    for row in range(len(batch["input_ids"])):
        ids, targets = batch["input_ids"][row], batch["target_ids"][row].tolist()
        real, documents = batch["attention_mask"][row].tolist(), _documents(batch, row, "")
        hidden = [bool(m) and t != IGNORE_INDEX for m, t in zip(ids == tokenizer.mask_token_id, targets, strict=True)]
        shown = []
        for place, token in enumerate(ids.tolist()):
            if not real[place]:
                continue
            kind: Kind = "hidden" if hidden[place] else "given"
            below = (ShownToken(piece(targets[place]), "trained"),) if hidden[place] else ()
            shown.append(ShownColumn((ShownToken(piece(token), kind),), below, "alone", documents[place]))
        padding = len(real) - sum(map(bool, real))
        counts: dict[str, object] = {"tokens": len(shown), "hidden": sum(hidden), PADDING: padding}
        counts |= {
            label: float(batch[key][row])
            for key, label in (("noise_t", "noise t"), ("noise_weight", "weight of a hidden token"))
            if key in batch
        }
        strip = ShownStrip("given to the model", "hidden there", [*shown, *_padding(padding, 0)])
        found.append(ShownRow("", counts, [strip]))
    return found


def vision_rows(task: Any, rows: list[dict[str, Any]], batch: Mapping[str, Any]) -> list[ShownRow]:
    """Each token over the label that it is trained to predict (labels are shifted), images where their tokens are."""
    processor = task.processing_class
    found = []
    for row in range(len(batch["input_ids"])):
        documents = _vision_documents(batch, row)
        ids, labels = batch["input_ids"][row], batch["labels"][row].tolist()
        media = is_media_token(ids, processor).tolist()
        in_order = batch["attention_mask"].ndim == 2 and not batch.get("left_out")
        images = _images(rows[row : row + 1] if in_order else _owners(task, rows, ids, documents))
        runs = _media_runs(ids.tolist(), media, documents, len(images))
        placed = images if len(images) == len(runs) else []
        columns = _vision_columns(processor, ids.tolist(), labels, media, documents, runs, placed)
        padding = documents.count(0)
        counts: dict[str, object] = {
            "tokens": len(documents) - padding,
            "trained on": sum(label != IGNORE_INDEX for label in labels),
            "media tokens": sum(media),
            PADDING: padding,
            "documents": max(documents, default=0),
        }
        strip = ShownStrip("token", "label it predicts", [*columns, *_padding(padding, 0)])
        found.append(ShownRow("", counts, [strip], [] if placed else images))
    return found


def _vision_columns(
    processor: Any,
    ids: list[int],
    labels: list[int],
    media: list[bool],
    documents: list[int],
    runs: list[range],
    images: list[str],
) -> list[ShownColumn]:
    """A box per token, and one per run of media tokens."""
    piece = _decoded(getattr(processor, "tokenizer", processor))
    begins = {run.start: number for number, run in enumerate(runs)}
    inside = {place for run in runs for place in run}
    columns = []
    for place, token in enumerate(ids):
        if place in begins:
            run = runs[begins[place]]
            image = images[begins[place]] if images else None
            columns.append(ShownColumn((ShownToken("media", "media", len(run)),), (), "alone", documents[place], image))
        elif documents[place] and place not in inside:
            trained = place and labels[place - 1] == token and documents[place - 1] == documents[place]
            kind: Kind = "media" if media[place] else "trained" if trained else "given"
            label = labels[place]
            below = (ShownToken(piece(label), "trained"),) if label != IGNORE_INDEX else ()
            columns.append(ShownColumn((ShownToken(piece(token), kind),), below, "alone", documents[place]))
    return columns


def _media_runs(ids: list[int], media: list[bool], documents: list[int], images: int) -> list[range]:
    """Which tokens stand for one medium: what lies together, or, where images touch, what lies between their frames."""
    together = _runs(media, documents)
    if len(together) == images or not images:
        return together
    (commonest, _), *_ = Counter(token for token, is_media in zip(ids, media, strict=True) if is_media).most_common(1)
    inner = [is_media and token == commonest for token, is_media in zip(ids, media, strict=True)]
    between = _runs(inner, documents)
    return between if len(between) == images else together


def _runs(wanted: list[bool], documents: list[int]) -> list[range]:
    """The runs of wanted tokens, each within one document."""
    found = []
    for (is_wanted, document), run in groupby(range(len(wanted)), key=lambda place: (wanted[place], documents[place])):
        if is_wanted and document:
            members = list(run)
            found.append(range(members[0], members[-1] + 1))
    return found


def _images(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The images of conversations that can be opened here, as data URIs."""
    copies = copied_in_rgb([row["conversation"] for row in rows], open_files=True)
    return [data_uri(image) for images in gather(copies).images for image in images if hasattr(image, "convert")]


def _vision_documents(batch: Mapping[str, Any], row: int) -> list[int]:
    """Which document each token belongs to, from 1; 0 on padding. Packs say so by their mask and positions."""
    mask = batch["attention_mask"]
    if mask.ndim == 2:
        return [int(attended) for attended in (mask[row] != 0).tolist()]
    real = mask[row, 0].diagonal()
    positions = batch["position_ids"]
    starts = (positions[row] if positions.ndim == 2 else positions[0, row]) == 0
    numbers: list[int] = ((starts & real).long().cumsum(0) * real.long()).tolist()
    return numbers


def _owners(
    task: Any, rows: Sequence[dict[str, Any]], ids: Int64[Tensor, " S"], documents: list[int]
) -> list[dict[str, Any]]:
    """The rows whose tokens a pack holds, in its order."""
    left = [(row, task.collator.document(row)["input_ids"][:-1]) for row in rows]
    of, owners = torch.tensor(documents), []
    for number in range(1, max(documents, default=0) + 1):
        mine = ids[of == number]
        at = next((place for place, (_, own) in enumerate(left) if torch.equal(own, mine)), None)
        if at is not None:
            owners.append(left.pop(at)[0])
    return owners


def _documents(batch: Mapping[str, Any], row: int, prefix: str) -> list[int]:
    """Which document each token belongs to, from 1; 0 on padding."""
    if f"{prefix}segment_ids" in batch:
        found: list[int] = batch[f"{prefix}segment_ids"][row].tolist()
        return found
    mask: Tensor = batch[f"{prefix}token_mask"] if f"{prefix}token_mask" in batch else batch["attention_mask"]
    return [int(attended) for attended in (mask[row] != 0).tolist()]


def _kinds(mask: Tensor, trained: Tensor) -> list[Kind]:
    return [
        "trained" if real and taught else "given" if real else PADDING
        for real, taught in zip(mask.tolist(), trained.tolist(), strict=True)
    ]


def _alone(tokens: list[ShownToken], documents: list[int]) -> list[ShownColumn]:
    shown = [
        ShownColumn((token,), (), "alone", document)
        for token, document in zip(tokens, documents, strict=True)
        if document
    ]
    return [*shown, *_padding(len(tokens) - len(shown), 0)]


def _padding(above: int, below: int) -> list[ShownColumn]:
    if not above and not below:
        return []
    sides = [() if not count else (ShownToken(PADDING, PADDING, count),) for count in (above, below)]
    return [ShownColumn(sides[0], sides[1], "alone", 0)]


def _pieces(tokenizer: Any) -> Callable[[int], str]:
    """A token's own bytes as text; special tokens by their names."""
    table, special = token_table(tokenizer), special_ids(tokenizer)

    def piece(token: int) -> str:
        if token in special:
            return str(tokenizer.convert_ids_to_tokens(token))
        return table.bytes_of(token).decode("utf-8", "backslashreplace")

    return piece


def _decoded(tokenizer: Any) -> Callable[[int], str]:
    """A token as the tokenizer writes it alone, which works for every processor."""
    return lambda token: str(tokenizer.decode([token]))
