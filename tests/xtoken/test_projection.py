"""Projections: built by bytes, written and read in three formats, refused for other tokenizers."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from spanwise.cli import main
from spanwise.spans.table import token_table
from spanwise.xtoken.exact_map import exact_token_map
from spanwise.xtoken.projection import Projection
from spanwise.xtoken.projection_build import build_projection
from spanwise.xtoken.projection_file import save_sparse_projection
from spanwise.xtoken.projection_report import check_projection, describe
from tests.conftest import real_tokenizer
from tests.tiny_tokenizers import byte_level_bpe, sentencepiece_bpe

PAIRS = ["byte_bpe/sentencepiece_bpe", "sentencepiece_bpe/byte_bpe", "byte_bpe/unigram", "wordpiece/byte_bpe"]


def sides(request: pytest.FixtureRequest, names: str):
    return [request.getfixturevalue(name) for name in names.split("/")]


def ordinary_bytes(tokenizer) -> list[bytes]:
    table = token_table(tokenizer)
    usable = (table.known & ~table.special).tolist()
    return [table.bytes_of(i) if usable[i] else b"" for i in range(table.size)]


@pytest.mark.parametrize("names", PAIRS)
def test_every_byte_equal_pair_is_exact_and_nothing_else(request, names: str) -> None:
    student, teacher = sides(request, names)
    projection = build_projection(student, teacher)
    near, far = ordinary_bytes(student), ordinary_bytes(teacher)
    exact = set(projection.exact_rows().tolist())
    for i, token in enumerate(near):
        if not token:
            continue
        assert (i in exact) == (token in set(far)), token
        if i in exact:
            assert far[int(projection.indices[i, 0])] == token
            assert projection.indices[i, 1:].eq(-1).all()
            assert projection.likelihoods[i].tolist() == [1.0] + [0.0] * (projection.indices.shape[1] - 1)


@pytest.mark.parametrize("names", PAIRS)
def test_rows_sum_to_one_and_ids_are_unique(request, names: str) -> None:
    projection = build_projection(*sides(request, names))
    filled = (projection.indices >= 0).any(-1)
    sums = projection.likelihoods.sum(-1)
    assert (sums[filled] - 1).abs().max() < 1e-6
    assert sums[~filled].eq(0).all()
    for row in projection.indices.tolist():
        ids = [i for i in row if i >= 0]
        assert len(ids) == len(set(ids))


def test_weights_of_a_split_token() -> None:
    """0.9 · 0.1^i over the teacher's parts, normalised; the first part dominates."""
    student, teacher = byte_level_bpe(600), byte_level_bpe(300)
    projection = build_projection(student, teacher)
    near, far = ordinary_bytes(student), ordinary_bytes(teacher)
    two_parts = 0
    for i in range(len(near)):
        ids = [j for j in projection.indices[i].tolist() if j >= 0]
        if len(ids) == 2 and b"".join(far[j] for j in ids) == near[i]:
            torch.testing.assert_close(projection.likelihoods[i, :2], torch.tensor([0.9, 0.09]) / 0.99)
            two_parts += 1
    assert two_parts > 20


def sentencepiece_with(letter: str):
    """The tiny SentencePiece tokenizer with one more piece, a letter that its training text lacks."""
    tokenizer = sentencepiece_bpe()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"][letter] = len(state["model"]["vocab"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_invalid_utf8_is_split_by_bytes(byte_bpe) -> None:
    """The letter é is two bytes, not the byte E9, in either direction."""
    pieces = sentencepiece_with("é")
    near, far = ordinary_bytes(byte_bpe), ordinary_bytes(pieces)
    letter = far.index("é".encode())
    projection = build_projection(byte_bpe, pieces)
    lone = near.index(b"\xe9")
    assert far[int(projection.indices[lone, 0])] == b"\xe9"
    assert letter not in projection.indices[lone].tolist()
    back = build_projection(pieces, byte_bpe)
    assert [near[i] for i in back.indices[letter, :2].tolist()] == [b"\xc3", b"\xa9"]
    assert lone not in back.indices[letter].tolist()


def test_specials_pair_by_role(byte_bpe, sentencepiece_bpe) -> None:
    projection = build_projection(byte_bpe, sentencepiece_bpe)
    assert int(projection.indices[byte_bpe.eos_token_id, 0]) == sentencepiece_bpe.eos_token_id
    assert int(projection.indices[byte_bpe.bos_token_id, 0]) == sentencepiece_bpe.bos_token_id


def test_a_tokenizer_that_cannot_encode_is_split_by_bytes() -> None:
    class Fake:
        pieces = ("a", "b", "ab", "abc", "c")

        def convert_ids_to_tokens(self, ids):
            return [self.pieces[i] if i < len(self.pieces) else None for i in ids]

    class Short(Fake):
        pieces = ("a", "b", "c")

    projection = build_projection(Fake(), Short())
    assert projection.indices[3, :3].tolist() == [0, 1, 2]


def test_top_k_larger_than_the_vocabulary_and_below_one(byte_bpe, unigram) -> None:
    assert build_projection(byte_bpe, unigram, top_k=10_000).indices.shape[1] <= token_table(unigram).size
    with pytest.raises(ValueError, match="at least 1"):
        build_projection(byte_bpe, unigram, top_k=0)


def test_strict_map_holds_every_exact_token_once(byte_bpe, sentencepiece_bpe) -> None:
    projection = build_projection(byte_bpe, sentencepiece_bpe)
    found = exact_token_map(
        projection.indices,
        projection.likelihoods,
        xtoken_loss=False,
        teacher_vocab_size=projection.teacher_vocab_size,
    )
    assert len(found["common_student"]) == len(projection.indices[projection.exact_rows(), 0].unique())
    assert len(found["common_student"]) > 100


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_written_and_read_back(tmp_path, byte_bpe, unigram, suffix: str) -> None:
    projection = build_projection(byte_bpe, unigram)
    file = tmp_path / f"p{suffix}"
    projection.save(file)
    back = Projection.load(file, student=byte_bpe, teacher=unigram)
    assert torch.equal(back.indices, projection.indices)
    assert torch.equal(back.likelihoods, projection.likelihoods)
    assert not list(tmp_path.glob("*.tmp"))
    if suffix == ".safetensors":
        assert back.metadata == projection.metadata
        with pytest.raises(ValueError, match="was built for the student tokenizer"):
            Projection.load(file, student=unigram)
        with pytest.raises(ValueError, match="was built for the teacher tokenizer"):
            Projection.load(file, teacher=byte_bpe)


def test_sparse_form(tmp_path, byte_bpe, unigram) -> None:
    projection = build_projection(byte_bpe, unigram)
    save_sparse_projection(projection, tmp_path / "s.pt")
    back = Projection.load(tmp_path / "s.pt")
    one, two = projection.entries(), back.entries()
    assert torch.equal(one.student, two.student)
    assert torch.equal(one.teacher, two.teacher)
    assert torch.equal(one.weight, two.weight)


def test_a_file_that_would_run_code_is_refused(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    torch.save({"indices": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="could run code"):
        Projection.load(tmp_path / "evil.pt")
    (tmp_path / "noise.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not in a recognized format"):
        Projection.load(tmp_path / "noise.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list"):
        Projection.load(tmp_path / "list.pt")
    with pytest.raises(FileNotFoundError, match="spanwise project build"):
        Projection.load(tmp_path / "absent.pt")


def test_what_is_no_projection_is_refused_by_name(tmp_path, byte_bpe, unigram) -> None:
    file = tmp_path / "p.safetensors"
    build_projection(byte_bpe, unigram).save(file)
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot be read.*expected a whole file.*Fix:"):
        Projection.load(tmp_path / "cut.safetensors")
    for odd in ({("a", "b"): 1.0}, {(-1, 2): 1.0}, {(0, 1): "much"}, {0: 1.0}):
        torch.save(odd, tmp_path / "odd.pt")
        with pytest.raises(ValueError, match="not in a recognized format"):
            Projection.load(tmp_path / "odd.pt")
    with pytest.raises(IsADirectoryError, match=r"is a folder.*Fix: -o"):
        Projection.load(file).save(tmp_path)
    ids = torch.zeros(2, 1, dtype=torch.long)
    for weight in (float("nan"), float("inf"), -0.5):
        with pytest.raises(ValueError, match="negative, infinite or NaN"):
            Projection(ids, torch.tensor([[1.0], [weight]]), 1)
    assert Projection(ids - 1, torch.full((2, 1), float("nan")), 1).exact_rows().tolist() == []


def test_a_written_file_has_the_permissions_of_any_other(tmp_path, byte_bpe, unigram) -> None:
    file, other = tmp_path / "new folder" / "p.safetensors", tmp_path / "other"
    build_projection(byte_bpe, unigram).save(file)
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


def test_a_file_without_fingerprints_is_fitted_to_its_tokenizers_or_refused(tmp_path, byte_bpe, unigram) -> None:
    """What other programs write: rows of a padded head, teacher ids that end early, pairs that end early."""
    built = build_projection(byte_bpe, unigram)
    students, teachers = built.indices.shape[0], built.teacher_vocab_size
    both = {"student": byte_bpe, "teacher": unigram}
    few = torch.where(built.indices < 50, built.indices, -1)

    def dense(ids: torch.Tensor, extra: int = 0) -> Projection:
        ids = torch.nn.functional.pad(ids, (0, 0, 0, extra), value=-1)
        weights = torch.nn.functional.pad(built.likelihoods, (0, 0, 0, extra))
        torch.save({"indices": ids, "likelihoods": weights}, tmp_path / "d.pt")
        return Projection.load(tmp_path / "d.pt", **both)

    found = dense(few, extra=7)
    assert (found.student_vocab_size, found.teacher_vocab_size) == (students, teachers)
    assert torch.equal(found.indices, few)
    torch.save({(0, 3): 1.0, (5, 4): 0.5}, tmp_path / "s.pt")
    found = Projection.load(tmp_path / "s.pt", **both)
    assert (found.student_vocab_size, found.teacher_vocab_size) == (students, teachers)
    beyond = few.clone()
    beyond[0, 0] = teachers
    for ids in (beyond, few[:-1]):
        torch.save({"indices": ids, "likelihoods": torch.ones(ids.shape)}, tmp_path / "d.pt")
        with pytest.raises(ValueError, match=r"built for other tokenizers.*project build"):
            Projection.load(tmp_path / "d.pt", **both)
    torch.save({(students, 0): 1.0}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match="built for other tokenizers"):
        Projection.load(tmp_path / "s.pt", **both)


def test_check_and_show(tmp_path, byte_bpe, unigram) -> None:
    file = tmp_path / "p.safetensors"
    build_projection(byte_bpe, unigram).save(file)
    told = check_projection(file, byte_bpe, unigram)
    assert told["ok"]
    assert told["missed"] == 0
    assert 0 < told["exact_share"] < told["coverage"] <= 1
    assert len(told["worst"]) == 10
    ordinary = [row for row in told["coverage_table"] if row["student tokens"] == "ordinary"]
    assert sum(row["share"] for row in ordinary) == pytest.approx(1)
    assert ordinary[0]["share"] == told["exact_share"]
    assert sum(row["tokens"] for row in told["coverage_table"]) == token_table(byte_bpe).size
    assert describe(Projection.load(file), file)["rows"] == token_table(byte_bpe).size
    broken = Projection.load(file)
    torch.save({"indices": broken.indices * 0 - 1, "likelihoods": broken.likelihoods}, tmp_path / "empty.pt")
    assert not check_projection(tmp_path / "empty.pt", byte_bpe, unigram)["ok"]
    with pytest.raises(ValueError, match="built for other tokenizers"):
        check_projection(tmp_path / "empty.pt", byte_level_bpe(900), unigram)


def test_command_line(tmp_path, capsys, byte_bpe, unigram) -> None:
    for name, tokenizer in (("s", byte_bpe), ("t", unigram)):
        tokenizer.save_pretrained(tmp_path / name)
    student, teacher, file = (str(tmp_path / name) for name in ("s", "t", "p.safetensors"))
    built = run(capsys, "project", "build", student, teacher, "-o", file, "--json")
    assert {"rows", "exact", "entries", "path"} <= set(built)
    with pytest.raises(SystemExit) as left:
        main(["project", "build", student, teacher, "-o", str(tmp_path)])
    assert left.value.code == 2
    assert "is a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["project", "build", student, teacher, "-o", file])
    assert "splitting the teacher's tokens" in capsys.readouterr().err
    assert run(capsys, "project", "show", file, "--json")["exact"] == built["exact"]
    checked = run(capsys, "project", "check", file, student, teacher, "--json")
    assert {"ok", "coverage", "exact_share", "worst"} <= set(checked)
    with pytest.raises(SystemExit):
        main(["project", "check", file, student, teacher])
    shown = capsys.readouterr().out
    for words in ("covered by", "one teacher token of equal bytes", "worst", "share"):
        assert words in shown
    assert "{'" not in shown
    with pytest.raises(SystemExit) as left:
        main(["project", "check", file, teacher, student, "--json"])
    assert left.value.code == 2
    assert "was built for the student tokenizer" in json.loads(capsys.readouterr().out)["error"]


def run(capsys, *words: str) -> dict:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.full
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("llama3_2", "qwen2_5"), ("llama2", "qwen3"), ("qwen3", "llama2"), ("llama3_2", "gemma3"),
        ("gemma3", "llama3_2"),
    ],
)  # fmt: skip
def test_real_pair_is_exact_and_complete(student: str, teacher: str) -> None:
    student, teacher = real_tokenizer(student), real_tokenizer(teacher)
    projection = build_projection(student, teacher)
    near, far = ordinary_bytes(student), set(ordinary_bytes(teacher))
    exact = set(projection.exact_rows().tolist())
    assert all((i in exact) == (token in far) for i, token in enumerate(near) if token)
    ordinary = ordinary_bytes(teacher)
    assert all(ordinary[int(projection.indices[i, 0])] == near[i] for i in exact if near[i])
    filled = (projection.indices >= 0).any(-1)
    assert (projection.likelihoods[filled].sum(-1) - 1).abs().max() < 1e-6
    # The letter é, and the lone byte E9 where both sides have one, each pair with their own kind.
    for token in ("é".encode(), b"\xe9"):
        if token in near and token in ordinary:
            assert ordinary[int(projection.indices[near.index(token), 0])] == token
