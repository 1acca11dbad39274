"""TokenAligner: roles, masks, unknown tokens, byte offsets, bad input."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.xtoken import AlignmentBatch, TokenAligner
from tests import tiny_tokenizers
from tests.conftest import real_tokenizer
from tests.xtoken.aligned import aligner, check_form, ids_of
from tests.xtoken.test_align_hard_cases import RING


class OnlyPieces:
    """The least a tokenizer can be."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(ids)


def align(student: Any, teacher: Any, student_ids: list[int], teacher_ids: list[int], **options: Any) -> AlignmentBatch:
    found = TokenAligner(student, teacher, byte_offsets=True).align(
        torch.tensor([student_ids]), torch.tensor([teacher_ids]), **options
    )
    check_form(found)
    return found


def test_the_seeds_arguments_are_kept() -> None:
    tokenizer = real_tokenizer("qwen3")
    made = TokenAligner(tokenizer, tokenizer, "some/path.pt", 7)
    assert (made.projection_matrix_path, made.max_comb_len) == ("some/path.pt", 7)


def test_bos_and_eos_of_both_sides_are_one_pair_each_and_correct() -> None:
    llama2, llama3 = real_tokenizer("llama2"), real_tokenizer("llama3_2")
    mine = [llama2.bos_token_id, *ids_of("llama2", "Hi there"), llama2.eos_token_id]
    theirs = [llama3.bos_token_id, *ids_of("llama3_2", "Hi there"), llama3.eos_token_id]
    found = align(llama2, llama3, mine, theirs)
    assert found.pair_is_correct[0].all()
    assert found.student_exact_partition_mask[0].all()
    assert found.student_chunk_id[0, 0] == found.teacher_chunk_id[0, 0] == 0
    assert found.student_chunk_id[0, -1] == found.teacher_chunk_id[0, -1] == found.num_chunks[0] - 1


def test_a_literal_is_text_and_an_inserted_token_is_not() -> None:
    llama2, qwen = real_tokenizer("llama2"), real_tokenizer("qwen3")
    mine = [llama2.bos_token_id, *ids_of("llama2", "<s>start")]
    found = align(llama2, qwen, mine, ids_of("qwen3", "<s>start"))
    chunks = found.student_chunk_id[0].tolist()
    assert found.pair_is_correct[0].tolist() == [False, True, True]
    assert chunks[:2] == [0, 1], "the first <s> was inserted, the second one is text"
    assert (found.teacher_chunk_id[0] == 1).sum() == len(qwen("<s>", add_special_tokens=False)["input_ids"])


ROWS = ["one two", "Été 12345: naïve\n\tx = 日本"]


def padded(rows: list[list[int]], pad: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, with at least one place of padding in every row."""
    width = max(map(len, rows)) + 1
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for row, content in enumerate(rows):
        here = slice(width - len(content), width) if left else slice(len(content))
        ids[row, here], mask[row, here] = torch.tensor(content, dtype=torch.long), 1
    return ids, mask


def same_as_alone(found: AlignmentBatch, row: int, masks: tuple[torch.Tensor, torch.Tensor], alone: Any) -> None:
    """A row of a batch is what it is without the batch, and its padding is in no pair."""
    for side, mask in zip(("student", "teacher"), masks, strict=True):
        for field, nothing in (("chunk_id", -1), ("byte_end", -1), ("exact_partition_mask", False)):
            values = getattr(found, f"{side}_{field}")[row]
            assert values[mask[row] == 1].equal(getattr(alone, f"{side}_{field}")[0])
            assert (values[mask[row] == 0] == nothing).all()
    pairs = int(alone.num_chunks[0])
    assert int(found.num_chunks[row]) == pairs
    assert found.pair_is_correct[row, :pairs].equal(alone.pair_is_correct[0, :pairs])
    assert not found.pair_valid[row, pairs:].any()


@pytest.mark.parametrize(("student", "teacher"), RING)
@pytest.mark.parametrize("left", [False, True])
def test_padding_never_pairs_wherever_it_stands_and_whatever_its_id(student: str, teacher: str, left: bool) -> None:
    """pad equals eos, and one row ends with a real eos; the last row is all padding; no mask means all are real."""
    eos = [real_tokenizer(name).eos_token_id for name in (student, teacher)]
    rows = [[ids_of(name, text) for text in ROWS] for name in (student, teacher)]
    for side, end in zip(rows, eos, strict=True):
        side.append([*side[0], end])
        side.append([])
    (mine, my_mask), (theirs, their_mask) = (padded(side, end, left) for side, end in zip(rows, eos, strict=True))
    made = aligner(student, teacher)
    found = made.align(mine, theirs, student_attention_mask=my_mask, teacher_attention_mask=their_mask.bool())
    check_form(found)
    for row in range(3):
        alone = made.align(torch.tensor([rows[0][row]]), torch.tensor([rows[1][row]]))
        assert alone.pair_is_correct[0].any()
        same_as_alone(found, row, (my_mask, their_mask), alone)
    assert found.pair_is_correct[2, found.num_chunks[2] - 1], "both ends of text are one pair"
    assert int(found.num_chunks[3]) == 0
    assert (found.student_chunk_id[3] == -1).all()
    assert (found.teacher_chunk_id[3] == -1).all()


def control_token(name: str, role: str) -> int:
    """The tokenizer's BOS or EOS, or another control token where it has none."""
    tokenizer = real_tokenizer(name)
    named = getattr(tokenizer, f"{role}_token_id")
    return tokenizer.all_special_ids[0] if named is None else named


@pytest.mark.parametrize(("student", "teacher"), RING)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("role", ["bos", "eos"])
def test_a_control_token_of_one_side_stands_alone(student: str, teacher: str, side: int, role: str) -> None:
    for text in ROWS:
        plain = [ids_of(name, text) for name in (student, teacher)]
        token = control_token((student, teacher)[side], role)
        rows = list(plain)
        rows[side] = [token, *plain[side]] if role == "bos" else [*plain[side], token]
        made = aligner(student, teacher)
        alone = made.align(*(torch.tensor([ids]) for ids in plain))
        found = made.align(*(torch.tensor([ids]) for ids in rows))
        check_form(found)
        place, before = (0, 1) if role == "bos" else (int(alone.num_chunks[0]), 0)
        assert int(found.num_chunks[0]) == int(alone.num_chunks[0]) + 1
        assert not found.pair_is_correct[0, place]
        assert found.pair_is_correct[0, [p for p in range(len(found.pair_valid[0])) if p != place]].equal(
            alone.pair_is_correct[0]
        )
        other = ("student", "teacher")[1 - side]
        expected = getattr(alone, f"{other}_chunk_id")
        assert getattr(found, f"{other}_chunk_id").equal(torch.where(expected >= 0, expected + before, expected))


@pytest.mark.parametrize(("student", "teacher"), RING)
@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_row_beside_a_full_one(student: str, teacher: str, empty: int) -> None:
    """One side of the second row was cut to nothing: nothing there is claimed, and the first row does not notice."""
    names = (student, teacher)
    rows = [[ids_of(name, ROWS[1]), ids_of(name, ROWS[0])] for name in names]
    rows[empty][1] = []
    sides = [padded(side, control_token(name, "eos"), False) for side, name in zip(rows, names, strict=True)]
    made = aligner(student, teacher)
    found = made.align(sides[0][0], sides[1][0], student_attention_mask=sides[0][1], teacher_attention_mask=sides[1][1])
    check_form(found)
    alone = made.align(*(torch.tensor([side[0]]) for side in rows))
    same_as_alone(found, 0, (sides[0][1], sides[1][1]), alone)
    assert not found.pair_is_correct[1].any()


def test_byte_ends_count_the_text_and_agree_at_common_boundaries() -> None:
    text = "Hello, wörld 12345"
    found = align(real_tokenizer("llama3_2"), real_tokenizer("qwen3"), ids_of("llama3_2", text), ids_of("qwen3", text))
    assert found.quality.tolist() == [0]
    assert found.student_byte_end[0, -1] == found.teacher_byte_end[0, -1] == len(text.encode())
    assert (found.student_byte_end[0].diff() > 0).all()


@settings(max_examples=30)
@given(text=st.text(st.sampled_from("abe\u0301\u0323 ▁é12\n"), max_size=25))
def test_a_token_with_a_byte_end_covers_its_own_bytes_on_both_sides(text: str) -> None:
    made = aligner("qwen3", "llama3_2")
    mine, theirs = ids_of("qwen3", text), ids_of("llama3_2", text)
    if not mine or not theirs:
        return
    found = made.align(torch.tensor([mine]), torch.tensor([theirs]))
    seen: dict[int, int] = {}
    for table, ids, ends in (
        (made.student_table, mine, found.student_byte_end),
        (made.teacher_table, theirs, found.teacher_byte_end),
    ):
        for token, end in zip(ids, ends[0].tolist(), strict=True):
            content = table.bytes_of(token)
            for place, byte in enumerate(content) if end >= 0 else ():
                assert seen.setdefault(end - len(content) + place, byte) == byte


def test_quality_says_how_it_was_found() -> None:
    made = aligner("qwen3", "llama3_2")
    texts = ["plain", "cafe\u0301 x"]
    rows = [[ids_of(name, text) for text in texts] for name in ("qwen3", "llama3_2")]
    padded = [
        torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in side], batch_first=True, padding_value=-1)
        for side in rows
    ]
    found = made.align(
        padded[0], padded[1], student_attention_mask=padded[0] >= 0, teacher_attention_mask=padded[1] >= 0
    )
    assert found.quality.tolist() == [0, 1]
    assert (
        TokenAligner(real_tokenizer("qwen3"), real_tokenizer("qwen3"))
        .align(padded[0][:1, :1], padded[0][:1, :1])
        .quality
        is None
    )


DOUBTFUL = "Hello World, the 日本 naïve ﬁle of ½ things; statement is executed."


def claims(student: Any, teacher: Any, text: str) -> int:
    """How many pairs are claimed; none holds an unknown token, and all spell the same on both sides."""
    ids, other = student(text)["input_ids"], teacher(text)["input_ids"]
    found = align(student, teacher, ids, other, texts=[text])
    unknown = torch.tensor([i == student.unk_token_id for i in ids])
    claimed = torch.tensor([c >= 0 and bool(found.pair_is_correct[0, c]) for c in found.student_chunk_id[0].tolist()])
    assert unknown.any()
    assert not (claimed & unknown).any()
    correct = found.pair_is_correct[0].nonzero().flatten().tolist()
    for chunk in correct:
        left = [ids[i] for i, c in enumerate(found.student_chunk_id[0].tolist()) if c == chunk]
        right = [other[i] for i, c in enumerate(found.teacher_chunk_id[0].tolist()) if c == chunk]
        spelled = "".join(p.removeprefix("##").replace("▁", " ") for p in student.convert_ids_to_tokens(left))
        assert spelled.strip() == teacher.decode(right).strip()
    return len(correct)


def test_wordpiece_abstains_rather_than_claim(byte_bpe: Any, wordpiece: Any) -> None:
    assert 5 < claims(wordpiece, byte_bpe, DOUBTFUL) < len(wordpiece(DOUBTFUL)["input_ids"])


def test_unigram_abstains_rather_than_claim(byte_bpe: Any, unigram: Any) -> None:
    """On a short text wholly; in a long one around what NFKC and unknown tokens changed."""
    from tests.tiny_tokenizers import corpus

    assert claims(unigram, byte_bpe, DOUBTFUL) == 0
    before, after = (" ".join(corpus()[number][:600].split()) for number in (3, 5))
    text = f"{before} {DOUBTFUL} {after}"
    assert 150 < claims(unigram, byte_bpe, text) < len(unigram(text)["input_ids"]) - 40


def test_two_wordpiece_tokenizers_agree_without_texts(wordpiece: Any) -> None:
    ids = wordpiece("the statement is executed")["input_ids"]
    assert align(wordpiece, wordpiece, ids, ids).pair_is_correct.all()


def test_long_text_with_unknown_tokens_is_resynchronised(byte_bpe: Any, unigram: Any) -> None:
    from tests.tiny_tokenizers import corpus

    text = corpus()[3][:600].replace("\n", " ") + " 日本 " + corpus()[5][:600].replace("\n", " ")
    text = " ".join(text.split())
    found = align(unigram, byte_bpe, unigram(text, add_special_tokens=False)["input_ids"], byte_bpe(text)["input_ids"])
    assert found.quality.tolist() == [2]
    assert found.pair_is_correct.float().mean() > 0.6


def test_pieces_alone_align_as_the_whole_tokenizer_does(byte_bpe: Any, sentencepiece_bpe: Any) -> None:
    text = "Statements are naïve 日本"
    mine, theirs = byte_bpe(text)["input_ids"], sentencepiece_bpe(text, add_special_tokens=False)["input_ids"]
    whole = align(byte_bpe, sentencepiece_bpe, mine, theirs)
    bare = align(OnlyPieces(byte_bpe), OnlyPieces(sentencepiece_bpe), mine, theirs)
    assert whole.pair_is_correct.all()
    assert bare.student_chunk_id.equal(whole.student_chunk_id)


def test_left_cut_text_is_aligned_from_its_end() -> None:
    import copy

    student = copy.deepcopy(real_tokenizer("llama3_2"))
    student.truncation_side = "left"
    text = "one two three four five"
    mine, theirs = ids_of("llama3_2", text)[-2:], ids_of("qwen3", text)
    found = align(student, real_tokenizer("qwen3"), mine, theirs)
    assert found.student_chunk_id.tolist() == [[0, 1]]
    assert found.teacher_chunk_id[0].tolist() == [-1] * (len(theirs) - 2) + [0, 1]


def test_repetitive_text_that_lost_its_beginning_is_aligned_from_its_end() -> None:
    """Its end is as well its beginning; the tokenizer that cut it says which."""
    import copy

    student = copy.deepcopy(real_tokenizer("llama3_2"))
    student.truncation_side = "left"
    for text in (" ab" * 10, "é é " * 6, "a\u0301 " * 8):
        mine, theirs = ids_of("llama3_2", text)[-5:], ids_of("qwen3", text)
        found = align(student, real_tokenizer("qwen3"), mine, theirs)
        assert found.student_chunk_id[0, -1] == found.teacher_chunk_id[0, -1] == found.num_chunks[0] - 1
        assert (found.teacher_chunk_id[0, : len(theirs) // 2] == -1).all()


def test_an_aligner_that_was_sent_to_a_worker_goes_on_here() -> None:
    """Sending moves the tables into shared memory, where both processes read them: nothing may look where they lay."""
    from multiprocessing.reduction import ForkingPickler

    student, teacher = tiny_tokenizers.byte_level_bpe(), tiny_tokenizers.sentencepiece_bpe()
    made = TokenAligner(student, teacher, byte_offsets=True)
    text = "The statement is executed: naïve 日本"
    ids = [torch.tensor([side(text, add_special_tokens=False)["input_ids"]]) for side in (student, teacher)]
    before = made.align(*ids)
    sent = ForkingPickler.dumps(made)
    filled = [torch.full((size,), 255, dtype=torch.uint8) for size in range(100, 20_000, 100)]
    after, there = made.align(*ids), pickle.loads(sent).align(*ids)
    assert filled
    assert made.student_table.flat.is_shared()
    for found in (after, there):
        assert found.student_chunk_id.equal(before.student_chunk_id)
        assert found.teacher_byte_end.equal(before.teacher_byte_end)


def test_an_aligner_survives_pickling() -> None:
    made = aligner("qwen3", "llama2")
    again = pickle.loads(pickle.dumps(made))
    ids = torch.tensor([ids_of("qwen3", "a b c")]), torch.tensor([ids_of("llama2", "a b c")])
    assert again.align(*ids).student_chunk_id.equal(made.align(*ids).student_chunk_id)


def four_parts(message: str) -> None:
    assert "expected" in message
    assert "probably" in message or "likely" in message
    assert "Fix:" in message


@pytest.mark.parametrize(
    ("student", "teacher", "options"),
    [
        (torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long), {}),
        (torch.zeros(3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long), {}),
        (torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long), {}),
        (torch.tensor([[10**7]]), torch.zeros(1, 1, dtype=torch.long), {}),
        (torch.tensor([[-100]]), torch.zeros(1, 1, dtype=torch.long), {}),
        (torch.tensor([[5, 6]]), torch.tensor([[5]]), {"student_attention_mask": torch.ones(1, 1, dtype=torch.long)}),
        (torch.tensor([[5]]), torch.tensor([[5]]), {"texts": []}),
        (torch.tensor([[5]]), torch.tensor([[5]]), {"texts": ["a \ud800 b"]}),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_remedy(student: Any, teacher: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        aligner("qwen3", "llama2").align(student, teacher, **options)
    four_parts(str(caught.value))


def test_texts_of_other_rows_are_refused() -> None:
    ids = (
        torch.tensor([ids_of("qwen3", "The quick brown fox")]),
        torch.tensor([ids_of("llama2", "The quick brown fox")]),
    )
    aligner("qwen3", "llama2").align(*ids, texts=["The quick brown fox jumps"])
    with pytest.raises(ValueError, match="another order than the rows") as caught:
        aligner("qwen3", "llama2").align(*ids, texts=["Something else entirely"])
    four_parts(str(caught.value))


def test_inputs_are_not_mutated() -> None:
    student, teacher = torch.tensor([ids_of("qwen3", " a b")]), torch.tensor([ids_of("llama2", " a b")])
    before = student.clone(), teacher.clone()
    aligner("qwen3", "llama2").align(student, teacher)
    assert student.equal(before[0])
    assert teacher.equal(before[1])
