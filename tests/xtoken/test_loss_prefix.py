"""Prefix KL against its twin, against enumeration of a Markov chain over bytes, and at its edges."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses.prefix import prefix_kl
from spanwise.xtoken.losses.prefix_plan import count_prefix_positions, plan_prefix
from spanwise.xtoken.losses.prefix_targets import prefix_targets
from spanwise.xtoken.losses.trie import PrefixTrie
from tests.reference import prefix_kl as twin
from tests.xtoken import toy

# The last id of each is the end of text, the one before begins it; neither has bytes.
STUDENT = [b"a", b"b", b"c", b"ab", b"abc", b"bc", b"aa", b"", b""]
TEACHER = [b"a", b"b", b"c", b"ca", b"bca", b"aab", b"ba", b"", b""]


def batch(texts: list[bytes], student: list[bytes] = STUDENT, teacher: list[bytes] = TEACHER):
    rows_s = [[len(student) - 2, *toy.greedy(student, text), len(student) - 1] for text in texts]
    rows_t = [[len(teacher) - 2, *toy.greedy(teacher, text), len(teacher) - 1] for text in texts]
    alignment = toy.align(student, teacher, rows_s, rows_t, eos=True)
    return alignment, toy.pad(rows_s, 0), toy.pad(rows_t, 0), rows_s, rows_t


@cache
def trie() -> PrefixTrie:
    return PrefixTrie.from_bytes(STUDENT, TEACHER, [(len(STUDENT) - 1, len(TEACHER) - 1)])


def twin_total(
    rows_s, rows_t, z, y, *, keep, temperature, reverse, min_mass=0.1, student=STUDENT, top_k=None,
    missing="tail_bucket",
):  # fmt: skip
    """With ``top_k`` the teacher's probabilities are known of its likeliest tokens and of the one that followed."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for b, (ids_s, ids_t) in enumerate(zip(rows_s, rows_t, strict=True)):
        logp = torch.log_softmax(y[b].double() / temperature, -1)
        listed = None
        if top_k is not None:
            listed = [{*row.topk(top_k).indices.tolist(), *ids_t[n + 1 : n + 2]} for n, row in enumerate(logp)]
        for position in range(1, len(ids_s)):
            made = twin.distribution(
                student, TEACHER, ids_s, ids_t, logp, position, {len(TEACHER) - 1: len(student) - 1},
                listed=listed, missing=missing,
            )  # fmt: skip
            assert made is not None
            mass, tail, kept = made
            count += 1
            if kept >= min_mass:
                total = total + twin.divergence(z[b, position - 1], mass, tail, keep, temperature, reverse)
    return total * temperature**2, count


@settings(max_examples=40)
@given(
    st.lists(st.text("abc", min_size=1, max_size=9).map(str.encode), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 24]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_equals_the_twin_in_value_and_gradient(texts, keep, temperature, reverse, seed) -> None:
    alignment, ids_s, ids_t, rows_s, rows_t = batch(texts)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(*ids_s.shape, len(STUDENT), generator=g, dtype=torch.float64, requires_grad=True)
    y = 2 * torch.randn(*ids_t.shape, len(TEACHER), generator=g, dtype=torch.float64)
    options = {"keep": keep, "temperature": temperature, "reverse": reverse}
    expected, count = twin_total(rows_s, rows_t, z, y, **options)
    parts = prefix_kl(
        z, TeacherScores(logits=y), alignment, trie=trie(), student_input_ids=ids_s, teacher_input_ids=ids_t,
        teacher_topk=None, **options,
    )  # fmt: skip
    assert float(parts.count) == count == float(count_prefix_positions(alignment, trie(), ids_s, ids_t))
    torch.testing.assert_close(parts.total, expected, rtol=1e-9, atol=1e-9)
    (wanted,) = torch.autograd.grad(expected, z)
    (got,) = torch.autograd.grad(parts.total, z)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


@settings(max_examples=40)
@given(
    st.lists(st.text("abc", min_size=1, max_size=9).map(str.encode), min_size=1, max_size=3),
    st.sampled_from([1, 2, 5]), st.sampled_from([0.0, 0.3]), st.sampled_from(["tail_bucket", "renormalise"]),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_truncated_scores_equal_the_twin(texts, top_k, min_mass, missing, reverse, seed) -> None:
    alignment, ids_s, ids_t, rows_s, rows_t = batch(texts)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(*ids_s.shape, len(STUDENT), generator=g, dtype=torch.float64, requires_grad=True)
    y = 2 * torch.randn(*ids_t.shape, len(TEACHER), generator=g, dtype=torch.float64)
    options = {"keep": 3, "temperature": 2.0, "reverse": reverse, "min_mass": min_mass, "missing": missing}
    expected, count = twin_total(rows_s, rows_t, z, y, top_k=top_k, **options)
    dense = TeacherScores(logits=y)
    cut = dense.topk(top_k, temperature=2.0)
    cut = replace(cut, observed_logp=dense.observed(ids_t, temperature=2.0))
    rest = {"trie": trie(), "student_input_ids": ids_s, "teacher_input_ids": ids_t}
    parts = prefix_kl(z, cut, alignment, **rest, **options)
    assert float(parts.count) == count
    torch.testing.assert_close(parts.total, expected, rtol=1e-9, atol=1e-9)
    wanted = torch.autograd.grad(expected, z, allow_unused=True)[0] if expected.requires_grad else None
    wanted = torch.zeros_like(z) if wanted is None else wanted
    torch.testing.assert_close(torch.autograd.grad(parts.total, z)[0], wanted, rtol=1e-8, atol=1e-9)
    from_dense = prefix_kl(z, dense, alignment, teacher_topk=top_k, **rest, **options)
    torch.testing.assert_close(from_dense.total, parts.total)


class MarkovTeacher:
    """A Markov chain over bytes: both vocabularies' true next-token distributions follow by enumeration."""

    def __init__(self, alphabet: bytes, seed: int, horizon: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.alphabet, self.horizon = alphabet, horizon
        self.transition = torch.softmax(
            1.5 * torch.randn(len(alphabet), len(alphabet), generator=g, dtype=torch.float64), -1
        )

    def probability(self, text: bytes, before: int) -> float:
        p, state = 1.0, self.alphabet.index(before)
        for byte in text:
            following = self.alphabet.index(byte)
            p *= float(self.transition[state, following])
            state = following
        return p

    def next_token(self, vocabulary: list[bytes], before: int) -> list[float]:
        """P(the greedy tokenization of what follows begins with token i): enumerate every continuation."""
        out = [0.0] * len(vocabulary)
        for letters in itertools.product(self.alphabet, repeat=self.horizon):
            text = bytes(letters)
            out[toy.greedy(vocabulary, text)[0]] += self.probability(text, before)
        return out


def chain_case(student: list[bytes], teacher: list[bytes], text: bytes, seed: int = 0):
    """Targets made from the true teacher distributions, and the true student distributions, at every position."""
    source = MarkovTeacher(b"abc", seed, max(map(len, student + teacher)))
    ids_s, ids_t = toy.greedy(student, text), toy.greedy(teacher, text)
    alignment = toy.align(student, teacher, [ids_s], [ids_t], bos=0)
    y = torch.zeros(1, len(ids_t), len(teacher), dtype=torch.float64)
    for at, end in enumerate(toy.ends(teacher, ids_t)):
        y[0, at] = torch.tensor(source.next_token(teacher, text[end - 1]), dtype=torch.float64).log()
    table = PrefixTrie.from_bytes(student, teacher)
    plan = plan_prefix(alignment, table, torch.tensor([ids_s]), torch.tensor([ids_t]))
    targets = prefix_targets(plan, TeacherScores(logits=y), table, keep=len(student), teacher_topk=None)
    before = [text[toy.ends(student, ids_s)[row] - 1] for row in plan.rows.tolist()]
    truth = [source.next_token(student, byte) for byte in before]
    return plan, targets, truth, ids_s


def test_exact_where_the_student_splits_the_teachers_tokens() -> None:
    """Every student token inside a teacher token: at common boundaries the true distribution comes out."""
    student, teacher = [b"a", b"b", b"c"], [b"a", b"b", b"c", b"ab", b"cab"]
    plan, targets, truth, _ = chain_case(student, teacher, b"abcabacbbcaab")
    at_boundary = (plan.passed == 0).nonzero().squeeze(1).tolist()
    assert len(at_boundary) > 4
    for n in at_boundary:
        got = dict(zip(targets.ids[n].tolist(), targets.mass[n].tolist(), strict=True))
        assert got == pytest.approx(dict(enumerate(truth[n])), abs=1e-12)
        assert float(targets.tail[n]) == pytest.approx(0, abs=1e-12)


def test_a_bytes_chain_inside_a_teacher_token_is_the_posterior() -> None:
    """Inside a teacher token the kept tokens are those that extend the passed bytes; their masses stay proportional."""
    student, teacher = [b"a", b"b", b"c"], [b"a", b"b", b"c", b"ab", b"ac"]
    source = MarkovTeacher(b"abc", 0, 2)
    plan, targets, _, _ = chain_case(student, teacher, b"cabab")
    n = (plan.passed > 0).nonzero().squeeze(1).tolist()[0]
    ab, ac = (source.probability(t, ord("c")) for t in (b"ab", b"ac"))
    got = dict(zip(targets.ids[n].tolist(), targets.mass[n].tolist(), strict=True))
    assert got[1] == pytest.approx(ab / (ab + ac))
    assert float(targets.kept[n]) == pytest.approx(ab + ac)


@pytest.mark.parametrize("seed", range(3))
def test_the_chain_gives_the_students_own_token_its_true_probability(seed: int) -> None:
    """A byte-level teacher and a student of longer tokens: P(u*) is the product over its bytes, and no fragment is
    pulled."""
    student, teacher = [b"a", b"b", b"c", b"ab", b"abc", b"bca"], [b"a", b"b", b"c"]
    plan, targets, _, ids = chain_case(student, teacher, b"cabcbcaabab", seed)
    source = MarkovTeacher(b"abc", seed, 3)
    text_ends = toy.ends(student, ids)
    long_ones = 0
    for n, row in enumerate(plan.rows.tolist()):
        target = ids[row + 1]
        if len(student[target]) == 1:
            continue
        long_ones += 1
        got = dict(zip(targets.ids[n].tolist(), targets.mass[n].tolist(), strict=True))
        before = b"cabcbcaabab"[text_ends[row] - 1]
        assert got[target] == pytest.approx(source.probability(student[target], before))
        fragment = toy.greedy([b"a", b"b", b"c"], student[target])[0]
        assert got.get(fragment, 0.0) == 0.0
        beyond = source.probability(student[target][:1], before) - got[target]
        assert float(targets.tail[n]) == pytest.approx(beyond)
    assert long_ones >= 3
