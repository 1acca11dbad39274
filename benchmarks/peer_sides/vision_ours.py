"""Conversations with images through our collator."""

from __future__ import annotations

from typing import Any

from benchmarks.peer_sides.serve import measured, serve
from benchmarks.peer_sides.vision_work import read_chats, released, timed_batch
from spanwise.spans.chat import UnprovenSpanError
from spanwise.vlm import VLMCollator
from tests.vlm import processors


class Ours:
    """One way: labels that are proven."""

    def labels(self, name: str, file: str, way: str) -> list[dict[str, Any]]:
        """Ids and labels of every conversation, or what was refused."""
        collator = VLMCollator(processors.build(name), allow_unlabelled=True)
        found: list[dict[str, Any]] = []
        for chat in read_chats(file):
            try:
                document = collator.document({"conversation": chat})
            except UnprovenSpanError as error:
                found.append({"error": str(error)})
            else:
                found.append({"ids": document["input_ids"].tolist(), "labels": document["labels"].tolist()})
        return found

    def collate(self, name: str, way: str, repeats: int) -> list[dict[str, float]]:
        """Seconds of the same batch, the first call left out."""
        collator = VLMCollator(released(name))
        rows = [{"conversation": chat} for chat in timed_batch()]
        collator(rows)
        return [measured(lambda: collator(rows))[0] for _ in range(repeats)]


if __name__ == "__main__":
    serve(Ours())
