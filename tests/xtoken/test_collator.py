"""CrossTokenizerCollator: keys and shapes, every kind of row, packing, workers, bad input."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from spanwise.batch import BatchedDataDict
from spanwise.xtoken import CrossTokenizerCollator, TokenAligner
from tests import tiny_tokenizers
from tests.conftest import real_tokenizer
from tests.xtoken.aligned import aligner

FIELDS = ("pair_valid", "pair_is_correct", "student_exact_partition_mask", "teacher_exact_partition_mask",
          "student_chunk_id", "teacher_chunk_id", "num_chunks")  # fmt: skip
TEXT = "Hello wörld, 12345 tokens and café."


def collator(student: str = "qwen3", teacher: str = "llama3_2", **options: Any) -> CrossTokenizerCollator:
    given = {"ctx_length_student": 48, "ctx_length_teacher": 40} | options
    return CrossTokenizerCollator(
        student_tokenizer=real_tokenizer(student),
        teacher_tokenizer=real_tokenizer(teacher),
        aligner=aligner(student, teacher),
        **given,
    )


def test_keys_shapes_and_types_of_one_teacher() -> None:
    rows = [
        {"message_log": [{"content": TEXT}], "loss_multiplier": 0.5, "idx": 11},
        {"message_log": [{"content": "Hel"}, {"content": "lo"}], "loss_multiplier": 1.0, "idx": 12},
    ]
    batch = collator(make_seq_div_by_student=32, make_seq_div_by_teacher=16)(rows)
    assert isinstance(batch, BatchedDataDict)
    assert set(batch) == {
        "input_ids", "input_lengths", "token_mask", "sample_mask", "idx", "labels_shifted", "left_out",
        "teacher_input_ids", "teacher_input_lengths", "teacher_token_mask", *(f"alignment_{name}" for name in FIELDS),
    }  # fmt: skip
    assert batch["input_ids"].shape == batch["token_mask"].shape == batch["alignment_student_chunk_id"].shape == (2, 64)
    assert batch["teacher_input_ids"].shape == batch["alignment_teacher_chunk_id"].shape == (2, 48)
    assert batch["sample_mask"].dtype == torch.float32
    assert batch["sample_mask"].tolist() == [0.5, 1.0]
    assert list(batch["idx"]) == [11, 12]
    assert batch["labels_shifted"] is False
    assert batch["input_lengths"].tolist() == batch["token_mask"].sum(1).tolist()
    tokenizer = real_tokenizer("qwen3")
    assert batch["input_ids"][1][: batch["input_lengths"][1]].tolist() == tokenizer("Hello")["input_ids"]
    assert (batch["alignment_student_chunk_id"][batch["token_mask"] == 0] == -1).all()


def test_byte_offsets_add_three_fields() -> None:
    batch = collator(byte_offsets=True)([{"text": TEXT}])
    assert batch["alignment_quality"].tolist() == [0]
    assert batch["alignment_student_byte_end"].max() == batch["alignment_teacher_byte_end"].max() == len(TEXT.encode())


def test_lists_of_teachers_are_always_indexed_and_none_emits_nothing() -> None:
    qwen, llama2 = real_tokenizer("qwen3"), real_tokenizer("llama2")
    batch = CrossTokenizerCollator(
        student_tokenizer=qwen,
        ctx_length_student=32,
        teacher_tokenizers=[qwen, llama2],
        aligners=[None, aligner("qwen3", "llama2")],
        ctx_length_teachers=[32, 50],
        make_seq_div_by_teachers=[1, 4],
    )([{"text": TEXT}])
    assert batch["teacher_1_input_ids"].shape == (1, 52)
    assert "alignment_1_pair_valid" in batch
    assert not any(key.startswith(("teacher_0", "alignment_0", "teacher_input", "alignment_pair")) for key in batch)


def test_padding_to_the_longest_and_up_to_the_divisor() -> None:
    batch = collator(padding="longest", make_seq_div_by_student=8)([{"text": "one two three"}, {"text": "four"}])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["token_mask"].sum(1).tolist() == [3, 1]


def test_texts_are_cut_to_the_context_and_tails_stay_unpaired() -> None:
    batch = collator(ctx_length_student=6, ctx_length_teacher=40)([{"text": TEXT}])
    assert batch["input_lengths"].tolist() == [6]
    assert (batch["alignment_teacher_chunk_id"][0] == -1).any()
    assert batch["alignment_pair_is_correct"][0, 1:6].all()


def test_tokenize_batch_is_static_and_leaves_the_tokenizer_alone() -> None:
    tokenizer = real_tokenizer("llama2")
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(max_length=7)
    try:
        before = (backend.truncation, backend.padding)
        ids, mask = CrossTokenizerCollator._tokenize_batch(["a b c d e f g h i", "x"], tokenizer, 9, 4)
        assert (backend.truncation, backend.padding) == before
    finally:
        backend.no_truncation()
    assert ids.shape == mask.shape == (2, 12)
    assert mask.sum(1).tolist() == [9, 2]


def test_append_eos_is_one_correct_pair() -> None:
    batch = collator(append_eos=True)([{"text": "Hi"}])
    last = batch["input_lengths"][0] - 1
    assert batch["input_ids"][0, last] == real_tokenizer("qwen3").eos_token_id
    assert batch["alignment_pair_is_correct"][0, batch["alignment_student_chunk_id"][0, last]]


def test_completions_are_trained_on_and_end_with_a_supervised_eos() -> None:
    qwen = real_tokenizer("qwen3")
    batch = collator()([{"prompt": "Question: what?\nAnswer:", "completion": " fine, thanks"}])
    trained = batch["input_ids"][0][batch["loss_mask"][0] > 0]
    assert qwen.decode(trained) == " fine, thanks<|im_end|>"
    for pair in range(int(batch["alignment_num_chunks"][0])):
        mine = batch["alignment_student_chunk_id"][0] == pair
        inside = bool((batch["loss_mask"][0][mine] > 0).all())
        assert bool(batch["alignment_pair_valid"][0, pair]) == inside


def test_a_token_across_the_seam_of_a_completion_is_not_trained_on() -> None:
    batch = collator()([{"prompt": "inter", "completion": "national"}])
    assert real_tokenizer("qwen3")("international")["input_ids"] == batch["input_ids"][0, :1].tolist()
    assert batch["loss_mask"][0].tolist()[:3] == [0, 1, 0]


@pytest.mark.parametrize(
    ("student", "teacher"), [("qwen3", "llama3_2"), ("llama3_2", "qwen2_5"), ("qwen2_5", "gemma3")]
)
def test_chats_are_rendered_by_each_side_and_aligned_turn_by_turn(student: str, teacher: str) -> None:
    said = ["Hello! 12345 é answers <b>.", "Bye 日本"]
    messages = [
        {"role": "user", "content": "Say: <|im_start|>assistant"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": said[1]},
        {"role": "assistant", "content": said[1]},
    ]
    batch = collator(student, teacher, ctx_length_student=160, ctx_length_teacher=160, byte_offsets=True)(
        [{"messages": messages}]
    )
    mine, theirs = (real_tokenizer(name) for name in (student, teacher))
    left, right = batch["alignment_student_chunk_id"][0], batch["alignment_teacher_chunk_id"][0]
    pairs = []
    for pair in batch["alignment_pair_is_correct"][0].nonzero().flatten().tolist():
        assert batch["alignment_pair_valid"][0, pair]
        assert (batch["loss_mask"][0][left == pair] == 1).all()
        pairs.append(
            (
                mine.decode(batch["input_ids"][0][left == pair]),
                theirs.decode(batch["teacher_input_ids"][0][right == pair]),
            )
        )
    text = "".join(first for first, second in pairs if first == second)
    assert text.replace("\ufffd", "") in ("".join(said), "".join(said).replace("日本", ""))
    closings = [pair for pair in pairs if pair[0] != pair[1]]
    assert len(closings) == 2
    assert all(first.startswith("<|") for first, _ in closings)


def test_an_empty_answer_is_its_closing_text() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    batch = collator("qwen2_5", "llama3_2", ctx_length_student=99, ctx_length_teacher=99)([{"messages": messages}])
    assert batch["alignment_num_chunks"].tolist() == [1]


def test_ids_of_the_student_become_the_teachers_text() -> None:
    qwen, llama = real_tokenizer("qwen3"), real_tokenizer("llama3_2")
    ids = qwen(TEXT)["input_ids"]
    batch = collator()([{"input_ids": torch.tensor([*ids, qwen.eos_token_id])}])
    assert batch["input_ids"][0][: len(ids) + 1].tolist() == [*ids, qwen.eos_token_id]
    assert batch["teacher_input_ids"][0][: batch["teacher_input_lengths"][0]].tolist() == llama(TEXT)["input_ids"]


def test_packing_lays_the_same_documents_on_both_sides() -> None:
    rows = [
        {"text": word * size, "idx": 100 + size, "loss_multiplier": size}
        for size, word in enumerate(["alpha ", "be ", "c d e ", "日本 ", "x\n"], 1)
    ]
    batch = collator(packing=True, ctx_length_student=24, ctx_length_teacher=30, byte_offsets=True)(
        [*rows, {"text": "long " * 60}, {"text": ""}]
    )
    alone = collator(byte_offsets=True)(rows)
    assert batch["left_out"]["longer_than_context"] == 1
    assert sorted(batch["idx"].tolist()) == [101, 102, 103, 104, 105]
    assert batch["sample_mask"].tolist() == [index - 100 for index in batch["idx"].tolist()]
    number = 0
    for row in range(len(batch["input_ids"])):
        assert batch["segment_ids"][row].max() == batch["teacher_segment_ids"][row].max()
        for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
            source = batch["idx"][number] - 101
            mine, theirs = batch["segment_ids"][row] == segment, batch["teacher_segment_ids"][row] == segment
            assert batch["position_ids"][row][mine].tolist() == list(range(int(mine.sum())))
            assert batch["input_ids"][row][mine].equal(alone["input_ids"][source][: int(mine.sum())])
            assert batch["teacher_input_ids"][row][theirs].equal(
                alone["teacher_input_ids"][source][: int(theirs.sum())]
            )
            pairs = (batch["alignment_pair_document"][row] == number).nonzero().flatten()
            assert len(pairs) == alone["alignment_num_chunks"][source]
            chunks = batch["alignment_student_chunk_id"][row][mine]
            expected = alone["alignment_student_chunk_id"][source][: int(mine.sum())]
            assert torch.where(chunks >= 0, chunks - pairs[0], chunks).equal(expected)
            assert batch["alignment_student_byte_end"][row][mine].equal(
                alone["alignment_student_byte_end"][source][: int(mine.sum())]
            )
            number += 1
    assert number == 5
    padding = batch["alignment_pair_document"] == -1
    assert padding.equal(~batch["alignment_pair_valid"])


def tiny_collator() -> CrossTokenizerCollator:
    student, teacher = tiny_tokenizers.byte_level_bpe(), tiny_tokenizers.sentencepiece_bpe()
    return CrossTokenizerCollator(
        student_tokenizer=student,
        teacher_tokenizer=teacher,
        aligner=TokenAligner(student, teacher, byte_offsets=True),
        ctx_length_student=64,
        ctx_length_teacher=64,
        byte_offsets=True,
    )


def same(first: BatchedDataDict, second: BatchedDataDict) -> bool:
    return set(first) == set(second) and all(
        value.equal(second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        for key, value in first.items()
    )


def test_workers_give_the_same_batches() -> None:
    rows = [{"text": text[:150]} for text in tiny_tokenizers.corpus()[:8]]
    made = tiny_collator()
    batches = [
        list(
            DataLoader(
                rows,
                batch_size=4,
                collate_fn=made,
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            )
        )
        for workers in (0, 2)
    ]
    assert all(same(one, other) for one, other in zip(*batches, strict=True))


def test_a_pickled_collator_gives_the_same_batch() -> None:
    made = tiny_collator()
    rows = [{"text": "The statement é"}, {"prompt": "a", "completion": " b"}]
    assert same(pickle.loads(pickle.dumps(made))(rows), made(rows))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"something": "else"}],
        [{"text": None}],
        [{"text": 5}],
        ["bare string"],
        [{"text": "a \udc80 b"}],
        [{"message_log": []}],
        [{"message_log": [{"role": "user"}]}],
        [{"messages": "not a list"}],
        [{"input_ids": [10**7]}],
        [{"input_ids": None}],
    ],
)
def test_bad_rows_are_refused_with_the_remedy(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)expected.*(probably|likely).*Fix:"):
        collator()(rows)


def test_ids_cut_inside_a_character_are_refused() -> None:
    table = aligner("qwen3", "llama3_2").student_table
    byte = next(token for token in range(table.size) if table.bytes_of(token) == b"\xc3")
    with pytest.raises(ValueError, match=r"no UTF-8.*expected ids of a whole text"):
        collator()([{"input_ids": [byte]}])


def test_bad_settings_are_refused_with_the_remedy() -> None:
    pattern = r"(?s)expected.*probably.*Fix:"
    for options in (
        {"ctx_length_student": 0},
        {"make_seq_div_by_teacher": 0},
        {"padding": "max"},
        {"teacher_tokenizers": [real_tokenizer("llama3_2")]},
    ):
        with pytest.raises(ValueError, match=pattern):
            collator(**options)
    with pytest.raises(ValueError, match=pattern):
        collator(packing=True, ctx_length_student=2)([{"text": TEXT}])


def test_a_tokenizer_without_pad_and_eos_is_refused(byte_bpe: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=byte_bpe.backend_tokenizer)
    made = CrossTokenizerCollator(
        student_tokenizer=bare, ctx_length_student=4, teacher_tokenizers=[], aligners=[], ctx_length_teachers=[]
    )
    with pytest.raises(ValueError, match=r"neither a pad token nor an eos.*expected.*probably.*Fix:"):
        made([{"text": "a"}])
