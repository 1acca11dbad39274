"""Blocks that two different streams certainly share."""

from __future__ import annotations

import random

from spanwise.spans.resync import SHORTEST, common_prefix, matched_blocks
from tests.tiny_tokenizers import corpus


def test_a_common_beginning_is_believed_up_to_the_last_window() -> None:
    text = b"the quick brown fox jumps over the lazy dog"
    blocks = matched_blocks(text + b"!", text + b"?")
    assert (blocks.student_start.tolist(), blocks.teacher_start.tolist()) == ([0], [0])
    assert len(text) - 2 * SHORTEST < blocks.length[0] < len(text)


def test_nothing_in_common_gives_no_block() -> None:
    assert len(matched_blocks(b"abcdef", b"uvwxyz").length) == 0
    assert len(matched_blocks(b"", b"abc").length) == 0


def test_blocks_lie_where_the_text_lies_under_random_edits() -> None:
    chance = random.Random(0)
    source = "".join(corpus()[:6]).encode()
    for _ in range(150):
        start = chance.randrange(len(source) - 1500)
        truth = source[start : start + 1500]
        sides = []
        for _side in range(2):
            stream, origin = bytearray(), []
            place = 0
            while place < len(truth):
                if chance.random() < 0.004:
                    place += chance.randrange(1, 9)  # lost
                elif chance.random() < 0.004:
                    stream += b"#"
                    origin.append(-1)  # added
                else:
                    stream.append(truth[place])
                    origin.append(place)
                    place += 1
            sides.append((bytes(stream), origin))
        (left, left_origin), (right, right_origin) = sides
        blocks = matched_blocks(left, right)
        for x, y, size in zip(blocks.student_start, blocks.teacher_start, blocks.length, strict=True):
            assert left_origin[x : x + size] == right_origin[y : y + size]
        assert (blocks.length[1:] >= SHORTEST).all()


def test_repetition_around_an_edit_is_not_believed() -> None:
    before, after = b"the first part of it, long enough; ", b"the second part of it, also long enough for a block."
    blocks = matched_blocks(before + b"a " * 40 + after, before + b"a " * 41 + after)
    for start, size in zip(blocks.student_start.tolist(), blocks.length.tolist(), strict=True):
        assert start + size <= len(before) or start >= len(before) + 80


def test_common_prefix() -> None:
    assert [common_prefix(b"", b"a"), common_prefix(b"ab", b"abc"), common_prefix(b"ab", b"xb")] == [0, 2, 0]
