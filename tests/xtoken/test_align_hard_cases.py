"""The hard cases, on real tokenizers, judged by the oracle: nothing wrong is claimed, and nearly nothing is missed."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fetch import DIGESTS, HANDFUL
from tests.xtoken.aligned import ids_of, judge

PROSE = "The quick brown fox — naïve café, 12345 items at £3.50; déjà vu.\n\tdef f(x):\n\t\treturn x + 1\r\n"
CASES = {
    "prose": PROSE,
    "nfd": unicodedata.normalize("NFD", "Été à l'école, naïve façade, Việt Nam, Ünïcödé ệ ộ ǘ."),
    "reordered marks": "q\u0307\u0323 e\u0301\u0323 a\u0323\u0302\u0306 x\u0315\u0300\u05ae\u0358",
    "jamo": "\u1112\u1161\u11ab\u1100\u116e\u11a8 \u1100\u1161 \u11a8 \uac00\u11a8",
    "singletons": "\u2126 \u212b \u212a \u1fbe \u2000x \uf900\uf901 \u0958 \u2adc",
    "lone marks": "\u0301 a \u0344b \u20d0 \u0e31\u0e33 \u093c",
    "literal ▁": "a▁b ▁▁c ▁",
    "literal Ġ": "Ġthe Ċ ĉ Ġ",
    "literal byte piece": "a<0x41>b <0xE9> <0x0A>",
    "leading space": " x y",
    "leading spaces": "   x y",
    "special literals": "a</s>b</s> c<|im_end|>d <s>x <|eot_id|>\n<end_of_turn> <|endoftext|><bos>y",
    "starts with <s>": "<s>start of text",
    "ends with literal": "the end<|im_end|>",
    "emoji": "👨‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️ 🙂",
    "rare": "\U0002a6d6\U00020000 𠮷野家 \u0378 \U000e0001 \U0010fffd \ufdd0",
    "control": "a\x00b\r\nc\rd\x85e\u2028f\x1b[0m\x7f",
    "digits": "1234567890 3.14159 2²³ ١٢٣ 12,345,678",
    "whitespace": "a  b   c\t\td\n\n\ne \n f\u00a0\u3000g      ",
    "repetition": "ab " * 60 + "a" * 50 + "<br>" * 20,
    "mixed scripts": "Привет мир שלום עולם مرحبا नमस्ते สวัสดี 你好世界 こんにちは 안녕하세요 Γειά",
    "code": "for (int i = 0; i < n; ++i) {\n    a[i] = b[i] /* x */ ;\n}\n",
}
NAMES = ("qwen3", "llama3_2", "gemma3", "llama2", "mistral_nemo", "command_r_plus")
# Every one once as a student and once as a teacher, of another kind where possible; the full run takes all pairs.
RING = [*zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True), ("llama2", "qwen3")]
EXACT = {"llama3_2", "mistral_nemo", "gpt4o", "deepseek_v3", "smollm2", "llama3"}


def hold_to_figures(student: str, teacher: str, case: str, text: str) -> None:
    verdict = judge(student, teacher, text)
    assert verdict.wrong == 0
    assert verdict.quality <= 1, "neither side needed more than a canonical form"
    least = 1.0 if {student, teacher} <= EXACT else 0.995
    assert verdict.coverage >= least, (student, teacher, case)
    assert verdict.finest >= (1.0 if {student, teacher} <= EXACT else 0.99), (student, teacher, case)


@pytest.mark.parametrize(("student", "teacher"), RING)
@pytest.mark.parametrize("case", CASES)
def test_hard_cases(case: str, student: str, teacher: str) -> None:
    hold_to_figures(student, teacher, case, CASES[case])


@pytest.mark.full
@pytest.mark.parametrize(("student", "teacher"), list(itertools.permutations(sorted([*DIGESTS, "smollm2"]), 2)))
def test_every_pair_on_every_hard_case(student: str, teacher: str) -> None:
    for case, text in CASES.items():
        hold_to_figures(student, teacher, case, text)


@pytest.mark.parametrize(("student", "teacher"), RING)
@pytest.mark.parametrize("case", ["prose", "nfd", "jamo", "emoji", "rare", "special literals", "leading space"])
def test_cut_at_different_bytes_leaves_the_tail_unpaired(case: str, student: str, teacher: str) -> None:
    text = CASES[case]
    sizes = len(ids_of(student, text)), len(ids_of(teacher, text))
    for cut in [(sizes[0] // 2, None), (None, sizes[1] // 2), (sizes[0] * 2 // 3, sizes[1] // 2), (1, None), (None, 1)]:
        verdict = judge(student, teacher, text, cut)
        print("CUT", student, teacher, case, cut, verdict)
        assert verdict.wrong == 0


ALL_PLANES = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("  \n\t▁Ġe\u0301\u0323\u1100\u1161\u11a8éÅ\u0344"),
    ),
    max_size=40,
)
LITERALS = st.sampled_from(
    [
        "</s>",
        "<s>",
        "<|im_end|>",
        "<|eot_id|>",
        "<bos>",
        "<eos>",
        "<unk>",
        "<0x41>",
        "<|begin_of_text|>",
        "<BOS_TOKEN>",
        "<pad>",
    ]
)
SEEDED = st.lists(st.one_of(ALL_PLANES, LITERALS), max_size=6).map("".join)


@pytest.mark.parametrize(("student", "teacher"), RING)
@settings(max_examples=25)
@given(text=ALL_PLANES)
def test_no_wrong_claim_on_any_text(student: str, teacher: str, text: str) -> None:
    assert judge(student, teacher, text).wrong == 0


@pytest.mark.parametrize(("student", "teacher"), RING)
@settings(max_examples=25)
@given(text=SEEDED)
def test_no_wrong_claim_among_special_token_literals(student: str, teacher: str, text: str) -> None:
    assert judge(student, teacher, text).wrong == 0


def test_the_handful_is_what_these_tests_use() -> None:
    assert set(NAMES) <= set(HANDFUL)
