"""Prompts that wait to be scored: laid together in one forward at a time, in a thread, within limits.

Memory is that of one forward of ``batch_tokens`` padded tokens; what waits costs its ids.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import torch

from spanwise.teachers.documents import DocumentScores, documents_of, split_scores
from spanwise.teachers.teacher import ScoreRequest, Teacher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeLimits:
    """What one request may ask for.

    Attributes:
        context_length: tokens per prompt.
        top_k: log-probabilities per position.
        request_bytes: of the body.
        prompts: per request.
        batch_tokens: padded tokens per forward.
        waiting: prompts that may wait; beyond it requests are answered with 429.
    """

    context_length: int
    top_k: int = 64
    request_bytes: int = 4 << 20
    prompts: int = 64
    batch_tokens: int = 4_096
    waiting: int = 1_024


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class _Waiting:
    ids: list[int]
    top_k: int
    temperature: float
    result: asyncio.Future[DocumentScores]


class ScoreQueue:
    """Scores prompts in batches, in a thread, one batch at a time."""

    def __init__(self, teacher: Teacher, limits: ServeLimits, device: torch.device | str = "cpu") -> None:
        self.teacher = teacher
        self.limits = limits
        self.device = device
        self._waiting: list[_Waiting] = []
        self._news = asyncio.Event()

    async def score(self, ids: list[int], top_k: int, temperature: float) -> DocumentScores:
        """The scores of one prompt of two tokens or more."""
        if len(self._waiting) >= self.limits.waiting:
            raise RefusedError(
                429, f"{len(self._waiting)} prompts are waiting; try again later, or lower your concurrency"
            )
        waiting = _Waiting(ids, top_k, temperature, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._news.set()
        return await waiting.result

    async def run(self) -> None:
        """Score until cancelled."""
        while True:
            await self._news.wait()
            batch = self._take()
            try:
                results = await asyncio.to_thread(self._score, batch)
            except Exception as error:  # a bad batch must not end the server
                logger.exception("scoring %d prompts failed", len(batch))
                for waiting in batch:
                    if not waiting.result.done():
                        waiting.result.set_exception(
                            RefusedError(500, f"scoring failed: {type(error).__name__}: {error}")
                        )
                continue
            for waiting, scores in zip(batch, results, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(scores)

    def _take(self) -> list[_Waiting]:
        """The longest-waiting prompts of one temperature that fit into a forward; always at least one."""
        batch, rest, longest = [], [], 0
        for waiting in self._waiting:
            width = max(longest, len(waiting.ids))
            fits = not batch or (
                width * (len(batch) + 1) <= self.limits.batch_tokens and waiting.temperature == batch[0].temperature
            )
            if waiting.result.done():  # its client went away
                continue
            if fits:
                batch.append(waiting)
                longest = width
            else:
                rest.append(waiting)
        self._waiting = rest
        if not rest:
            self._news.clear()
        return batch

    def _score(self, batch: list[_Waiting]) -> list[DocumentScores]:
        if not batch:
            return []
        width = max(len(waiting.ids) for waiting in batch)
        ids, mask = torch.zeros(2, len(batch), width, dtype=torch.long)
        for row, waiting in enumerate(batch):
            ids[row, : len(waiting.ids)] = torch.as_tensor(waiting.ids)
            mask[row, : len(waiting.ids)] = 1
        request = ScoreRequest(
            ids.to(self.device),
            mask.to(self.device),
            temperature=batch[0].temperature,
            top_k=max(1, max(waiting.top_k for waiting in batch)),
            statistics=True,
        )
        return split_scores(documents_of(request), self.teacher.score(request))
