"""TokenAligner: roles, masks, unknown tokens, byte offsets, bad input."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.xtoken import AlignmentBatch, TokenAligner
from tests.conftest import real_tokenizer
from tests.xtoken.aligned import aligner, check_form, ids_of


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


def test_bos_of_one_side_stands_alone() -> None:
    llama3 = real_tokenizer("llama3_2")
    found = align(
        llama3, real_tokenizer("qwen3"), [llama3.bos_token_id, *ids_of("llama3_2", "Hi")], ids_of("qwen3", "Hi")
    )
    assert found.pair_valid.tolist() == [[True, True]]
    assert found.pair_is_correct.tolist() == [[False, True]]


def test_a_literal_is_text_and_an_inserted_token_is_not() -> None:
    llama2, qwen = real_tokenizer("llama2"), real_tokenizer("qwen3")
    mine = [llama2.bos_token_id, *ids_of("llama2", "<s>start")]
    found = align(llama2, qwen, mine, ids_of("qwen3", "<s>start"))
    chunks = found.student_chunk_id[0].tolist()
    assert found.pair_is_correct[0].tolist() == [False, True, True]
    assert chunks[:2] == [0, 1], "the first <s> was inserted, the second one is text"
    assert (found.teacher_chunk_id[0] == 1).sum() == len(qwen("<s>", add_special_tokens=False)["input_ids"])


def test_padding_never_pairs_wherever_it_stands_and_whatever_its_id() -> None:
    qwen, llama = real_tokenizer("qwen3"), real_tokenizer("llama3_2")
    mine, theirs = ids_of("qwen3", "one two"), ids_of("llama3_2", "one two")
    pad, eos = qwen.eos_token_id, llama.eos_token_id
    student = torch.tensor([[pad, pad, *mine, qwen.eos_token_id], [pad] * (len(mine) + 3)])
    teacher = torch.tensor([[*theirs, eos, eos, -100], [eos] * (len(theirs) + 3)])
    student_mask, teacher_mask = torch.ones_like(student), torch.ones_like(teacher)
    student_mask[0, :2] = student_mask[1] = 0
    teacher_mask[0, -2:] = teacher_mask[1] = 0
    found = aligner("qwen3", "llama3_2").align(
        student, teacher, student_attention_mask=student_mask, teacher_attention_mask=teacher_mask.bool()
    )
    check_form(found)
    assert (found.student_chunk_id[student_mask == 0] == -1).all()
    assert (found.student_byte_end[student_mask == 0] == -1).all()
    assert found.num_chunks.tolist() == [3, 0]
    assert found.pair_valid[1].sum() == 0
    assert found.pair_is_correct[0].tolist() == [True] * 3


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


def test_wordpiece_and_unigram_abstain_rather_than_claim(byte_bpe: Any, wordpiece: Any, unigram: Any) -> None:
    text = "Hello World, the 日本 naïve ﬁle of ½ things; statement is executed."
    for student in (wordpiece, unigram):
        ids, other = student(text)["input_ids"], byte_bpe(text)["input_ids"]
        found = align(student, byte_bpe, ids, other, texts=[text])
        unknown = torch.tensor([i == student.unk_token_id for i in ids])
        claimed = torch.tensor(
            [c >= 0 and bool(found.pair_is_correct[0, c]) for c in found.student_chunk_id[0].tolist()]
        )
        assert unknown.any()
        assert not (claimed & unknown).any()
        for chunk in found.pair_is_correct[0].nonzero().flatten().tolist():
            left = [ids[i] for i, c in enumerate(found.student_chunk_id[0].tolist()) if c == chunk]
            right = [other[i] for i, c in enumerate(found.teacher_chunk_id[0].tolist()) if c == chunk]
            spelled = "".join(p.removeprefix("##").replace("▁", " ") for p in student.convert_ids_to_tokens(left))
            assert spelled.strip() == byte_bpe.decode(right).strip()


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
