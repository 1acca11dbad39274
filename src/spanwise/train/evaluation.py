"""Bits per byte: what a language model needs to write a text down, comparable across tokenizers.

Each document is tokenised once, a start token (bos, else eos) before it. Windows advance in bytes: the first scores its
``window_bytes``, every later one the next ``stride_bytes`` with the bytes before them as context. A window begins at a
token that begins a character and never reaches into another document. So every byte of the text is scored exactly once,
special tokens are not scored, and a head wider than the tokenizer is cut before the softmax.

Time: one forward over about window/stride times the text. Memory: one batch of windows' logits, O(batch · T · V).

Shapes: W windows in a batch, L their longest length, V vocabulary, N scored positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.spans.table import TokenTable, token_table
from spanwise.teachers.local import most_positions


@dataclass(frozen=True)
class Measured:
    """Held-out measures of one model on some documents."""

    nats: float
    bytes: int
    tokens: int
    hits: int
    documents: int

    @property
    def bits_per_byte(self) -> float:
        """Nats over all scored tokens, in bits, per byte of the text."""
        return self.nats / math.log(2) / max(self.bytes, 1)

    @property
    def next_token_accuracy(self) -> float:
        """Share of scored tokens that the model held likeliest."""
        return self.hits / max(self.tokens, 1)

    def as_metrics(self) -> dict[str, float]:
        """The names that logs and ``--json`` use."""
        return {
            "bits_per_byte": self.bits_per_byte,
            "next_token_accuracy": self.next_token_accuracy,
            "bytes": self.bytes,
            "tokens": self.tokens,
        }


@dataclass(frozen=True)
class Window:
    """Some tokens of one document; those from ``scored_from`` on are scored here and nowhere else."""

    ids: list[int]
    scored_from: int


def document_windows(
    text: str, tokenizer: Any, table: TokenTable, *, window_bytes: int, stride_bytes: int
) -> list[Window]:
    """Cut one document into windows of tokens by bytes. Empty text gives none."""
    if not 0 < stride_bytes <= window_bytes:
        raise ValueError(
            f"windows of {window_bytes} bytes advance by {stride_bytes}; expected a stride from 1 to the window. The "
            "two were probably swapped. Fix: set eval.stride_bytes to about half of eval.window_bytes."
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        return []
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise ValueError(
            "the tokenizer has neither a bos nor an eos token; expected one to stand before each document, so that the "
            "first token can be scored. Fix: give the tokenizer an eos_token."
        )
    begins = [0, *torch.cumsum(table.lengths[ids[:-1]], 0).tolist()]
    windows: list[Window] = []
    first, scored_end = 0, window_bytes
    while first < len(ids):
        last = first
        while last < len(ids) and begins[last] < scored_end:
            last += 1
        if last > first:
            context = _context_start(ids, begins, table, first, scored_end - window_bytes)
            tokens = ids[context:last]
            windows.append(Window([start, *tokens] if context == 0 else tokens, first - context + (context == 0)))
        first = last
        scored_end += stride_bytes
    return windows


def _context_start(ids: list[int], begins: list[int], table: TokenTable, first: int, from_byte: int) -> int:
    """The token at which a window begins: at most ``window_bytes`` back, at a character, at least one token back."""
    if from_byte <= 0:
        return 0
    context = first
    while context > 0 and begins[context - 1] >= from_byte:
        context -= 1
    if context == first:
        context -= 1
    while context > 0 and table.bytes_of(ids[context])[:1] and table.bytes_of(ids[context])[0] & 0xC0 == 0x80:
        context -= 1
    return context


@torch.no_grad()
def measure(
    model: Any,
    tokenizer: Any,
    documents: Iterable[str],
    *,
    window_bytes: int = 2_048,
    stride_bytes: int = 1_024,
    batch_size: int = 8,
) -> Measured:
    """Bits per byte and next-token accuracy of a causal language model on whole documents.

    Args:
        model: a causal language model of transformers; put into evaluation mode and left as it was.
        tokenizer: its tokenizer.
        documents: texts; empty ones count nothing.
        window_bytes: bytes of context and score per window.
        stride_bytes: bytes by which windows advance.
        batch_size: windows per forward.
    """
    size = len(tokenizer)
    was_training = model.training
    model.eval()
    nats, hits, tokens = 0.0, 0, 0
    seen: Counter[str] = Counter()
    try:
        texts, sizes = _counted(documents, seen), {"window_bytes": window_bytes, "stride_bytes": stride_bytes}
        windows = windows_of(texts, tokenizer, **sizes)
        for batch in _batches(windows, batch_size):
            batch_nats, batch_hits, batch_tokens = _score(model, batch, size)
            nats, hits, tokens = nats + batch_nats, hits + batch_hits, tokens + batch_tokens
    finally:
        model.train(was_training)
    if not tokens:
        raise ValueError(
            f"the held-out text has {seen['documents']} documents and no token; expected text to measure on. The file "
            "is probably empty or its text under another column. Fix: check data.eval and data.columns."
        )
    return Measured(nats, seen["bytes"], tokens, hits, seen["documents"])


def _counted(documents: Iterable[str], seen: Counter[str]) -> Iterator[str]:
    for text in documents:
        seen["bytes"] += len(text.encode("utf-8", errors="surrogatepass"))
        seen["documents"] += 1
        yield text


def windows_of(documents: Iterable[str], tokenizer: Any, *, window_bytes: int, stride_bytes: int) -> Iterator[Window]:
    """The windows of every document, one document at a time."""
    table = token_table(tokenizer)
    for text in documents:
        yield from document_windows(text, tokenizer, table, window_bytes=window_bytes, stride_bytes=stride_bytes)


def check_windows(model: Any, windows: Iterable[Window]) -> None:
    """Refuse windows that are longer than the model has positions for."""
    most = most_positions(model)
    for window in windows:
        if most is not None and len(window.ids) > most:
            raise ValueError(
                f"a window of the held-out text has {len(window.ids)} tokens and the model has {most} positions; "
                "expected windows that fit. The window is probably too long for this tokenizer. Fix: lower "
                "eval.window_bytes."
            )


def _batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:
        batch.append(window)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _score(model: Any, windows: list[Window], size: int) -> tuple[float, int, int]:
    """Summed nats, hits and scored tokens of a batch of windows."""
    device = next(model.parameters()).device
    check_windows(model, windows)
    ids, mask = pad_windows(windows)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    rows, columns = _scored_positions(windows)
    targets = ids[rows, columns].to(device)
    picked = logits[rows.to(device), (columns - 1).to(device), :size]
    nats, hits = token_scores(picked, targets)
    return float(nats.double().sum()), int(hits.sum()), len(targets)


def pad_windows(windows: list[Window]) -> tuple[Int[Tensor, "W L"], Int[Tensor, "W L"]]:
    """Ids padded with 0 on the right, and their mask."""
    width = max(len(window.ids) for window in windows)
    ids = torch.zeros(len(windows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        mask[row, : len(window.ids)] = 1
    return ids, mask


def _scored_positions(windows: list[Window]) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    pairs = [(row, column) for row, w in enumerate(windows) for column in range(w.scored_from, len(w.ids))]
    places = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def token_scores(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> tuple[Tensor, Tensor]:
    """Nats per token in float32, and whether the likeliest token was the right one; O(piece · V) extra memory."""
    nats, hits = [], []
    for piece, target in zip(logits.split(512), targets.split(512), strict=True):
        values = piece.float()
        nats.append(torch.logsumexp(values, -1) - values.gather(1, target[:, None]).squeeze(1))
        hits.append(values.argmax(-1) == target)
    return torch.cat(nats), torch.cat(hits)


def evaluate_model(
    model_source: str,
    *,
    data: str,
    columns: Mapping[str, str] | None = None,
    tokenizer_source: str | None = None,
    teacher_source: str | None = None,
    window_bytes: int = 2_048,
    stride_bytes: int = 1_024,
    batch_size: int = 8,
    documents: int | None = None,
) -> dict[str, float]:
    """What ``spanwise eval`` prints: bits_per_byte, next_token_accuracy, bytes, tokens (+ teacher_agreement)."""
    from spanwise.loading import load_model, load_tokenizer
    from spanwise.teachers.local import move_to_gpu
    from spanwise.train.agreement import teacher_agreement
    from spanwise.train.held_out import documents as held_out
    from spanwise.train.student import check_head

    def texts() -> Iterator[str]:
        return held_out(data, columns=columns or {}, most=documents)

    # What is wrong with the text or the windows is said before a model is loaded.
    tokenizer = load_tokenizer(tokenizer_source or model_source)
    sizes = {"window_bytes": window_bytes, "stride_bytes": stride_bytes}
    next(windows_of(texts(), tokenizer, **sizes), None)
    model: Any = load_model(model_source)
    check_head(model, tokenizer, "the model")
    move_to_gpu(model)
    result = measure(model, tokenizer, texts(), batch_size=batch_size, **sizes).as_metrics()
    if teacher_source is not None:
        teacher: Any = load_model(teacher_source)
        teacher_tokenizer = load_tokenizer(teacher_source)
        check_head(teacher, teacher_tokenizer, "the teacher")
        move_to_gpu(teacher)
        result["teacher_agreement"] = teacher_agreement(
            model, tokenizer, teacher, teacher_tokenizer, texts(), window_bytes=window_bytes, batch_size=batch_size
        )
    return result
