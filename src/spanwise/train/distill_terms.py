"""One term per teacher: what each loss family asks of a teacher, how it counts, and how it is called.

To offer another loss in recipes, add its name to ``LOSS_NAMES`` and a branch to ``TeacherTerm.loss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from spanwise.loss_parts import LossParts
from spanwise.teachers.scores import Form, TeacherScores
from spanwise.teachers.teacher import AskedAhead, ScoreRequest, Teacher, request_from_batch
from spanwise.train.recipe import Section

LOSS_NAMES = ("prefix_kl", "projected_kl", "gold", "h_kl", "alm", "uld", "kl", "jsd")
SAME_TOKENIZER = frozenset({"kl", "jsd"})
NEEDS_PROJECTION = frozenset({"projected_kl", "gold", "h_kl"})
# What a family can work with; truncated scores serve all of them, single log-probabilities only ALM.
FORMS: dict[str, frozenset[Form]] = {name: frozenset({"dense", "topk"}) for name in LOSS_NAMES}
FORMS["alm"] = frozenset({"dense", "observed"})

CHUNK_LOSSES = frozenset({"projected_kl", "gold", "h_kl", "alm", "uld"})
# Which families read an option; the others refuse it.
OPTIONS: dict[str, frozenset[str]] = {
    "reverse": frozenset(LOSS_NAMES) - {"uld", "jsd"},
    "top_k": frozenset(LOSS_NAMES) - {"alm"},
    "keep": frozenset({"prefix_kl"}),
    "min_mass": frozenset({"prefix_kl"}),
    "vocab_topk": frozenset({"projected_kl"}),
    "uncommon_topk": frozenset({"gold", "h_kl"}),
    "exact_token_match_only": CHUNK_LOSSES,
    "missing": frozenset(LOSS_NAMES) - {"alm"},
}


class LossFamily(Section):
    """A loss family and its options; an option of another family is refused."""

    name: Literal["prefix_kl", "projected_kl", "gold", "h_kl", "alm", "uld", "kl", "jsd"] = "prefix_kl"
    reverse: bool = Field(False, description="Student relative to teacher.")
    top_k: int | None = Field(None, ge=1, description="Teacher tokens read per position (prefix_kl: 64, kl: all).")
    keep: int = Field(24, ge=1, description="prefix_kl: student tokens compared one by one.")
    min_mass: float = Field(
        0.1, ge=0, lt=1, description="prefix_kl: positions with less kept teacher mass are skipped."
    )
    vocab_topk: int = Field(8_192, ge=1, description="projected_kl: teacher tokens compared.")
    uncommon_topk: int = Field(8_192, ge=1, description="gold, h_kl: tokens of the uncommon tails.")
    exact_token_match_only: bool = Field(False, description="Chunk losses: only pairs that cover the same bytes.")
    missing: Literal["tail_bucket", "renormalise"] = Field(
        "tail_bucket", description="Truncated scores: the rest's mass."
    )

    @model_validator(mode="after")
    def _options_are_its_own(self) -> LossFamily:
        fields = type(self).model_fields
        foreign = sorted(
            option
            for option, families in OPTIONS.items()
            if self.name not in families and getattr(self, option) != fields[option].default
        )
        if foreign:
            raise ValueError(
                f"the loss '{self.name}' has no {', '.join(foreign)}; expected options of this family only"
            )
        return self


@dataclass
class TeacherTerm:
    """One teacher and the loss it teaches through."""

    index: int
    family: LossFamily
    teacher: Teacher
    teacher_tokenizer: Any
    aligner: Any
    student_size: int
    temperature: float
    helper: Any = None
    helper_device: str = "cpu"

    @property
    def prefix(self) -> str:
        """Of the batch's keys for this teacher."""
        return f"teacher_{self.index}_"

    def plan(self, batch: Mapping[str, Any]) -> Any:
        """What is compared, from integers alone."""
        from spanwise.xtoken.losses.plan import chunk_plan_of_batch, token_plan_of_batch
        from spanwise.xtoken.losses.prefix_plan import prefix_plan_of_batch

        if self.family.name in SAME_TOKENIZER:
            return token_plan_of_batch(batch)
        if self.family.name == "prefix_kl":
            return prefix_plan_of_batch(batch, self._helper_for(batch["input_ids"]), teacher_index=self.index)
        return chunk_plan_of_batch(
            batch, teacher_index=self.index, exact_token_match_only=self.family.exact_token_match_only
        )

    def count(self, batch: Mapping[str, Any]) -> Float[Tensor, ""]:
        """How much the term counts."""
        count: Tensor = self.plan(batch).count
        return count

    def request(self, batch: Mapping[str, Any]) -> ScoreRequest:
        """What the teacher is asked for."""
        name = self.family.name
        if name in SAME_TOKENIZER:
            own = {
                f"{self.prefix}{key}": batch[key] for key in ("input_ids", "token_mask", "segment_ids") if key in batch
            }
            return request_from_batch(own, self.prefix, temperature=self.temperature, top_k=self.family.top_k)
        if name == "alm":
            # It reads one log-probability per token, at temperature 1; the loss applies its own.
            return request_from_batch(batch, self.prefix, statistics=True, top_k=1)
        top_k = 64 if self.family.top_k is None and name == "prefix_kl" else self.family.top_k
        # Prefix KL also reads the observed token, which top-k may have left out.
        seen = name == "prefix_kl"
        asked = request_from_batch(batch, self.prefix, temperature=self.temperature, top_k=top_k, statistics=seen)
        if name == "projected_kl" and top_k is None and isinstance(self.teacher, AskedAhead):
            from spanwise.xtoken.losses.shared_set import pick_of_plan

            return replace(asked, pick=pick_of_plan(self.plan(batch), self.family.vocab_topk))
        return asked

    def announce(self, batch: Mapping[str, Any]) -> None:
        """Tell a teacher that gains from it what it will be asked for."""
        if isinstance(self.teacher, AskedAhead):
            self.teacher.announce(self.request(batch))

    def loss(self, logits: Tensor, scores: TeacherScores, batch: Mapping[str, Any], scale: float) -> LossParts:
        """The term's parts."""
        from spanwise.xtoken import losses

        family = self.family
        helper = self._helper_for(logits)
        common: dict[str, Any] = {"plan": self.plan(batch), "temperature": self.temperature, "scale": scale}
        if family.name == "prefix_kl":
            how = {"reverse": family.reverse, "keep": family.keep, "min_mass": family.min_mass}
            return losses.prefix_kl(logits, scores, trie=helper, missing=family.missing, **how, **common)
        if family.name == "projected_kl":
            how = {"reverse": family.reverse, "vocab_topk": family.vocab_topk}
            return losses.projected_kl(logits, scores, None, helper, missing=family.missing, **how, **common)
        if family.name in ("gold", "h_kl"):
            how = {"relaxed": family.name == "h_kl", "reverse": family.reverse, "uncommon_topk": family.uncommon_topk}
            return losses.gold(logits, scores, None, helper, missing=family.missing, **how, **common)
        width = {"student_vocab_size": self.student_size}
        if family.name == "alm":
            difference: Any = "reverse" if family.reverse else "forward"
            ids = batch["input_ids"]
            return losses.alm(logits, scores, None, student_input_ids=ids, difference=difference, **width, **common)
        if family.name == "uld":
            size = self.teacher.vocab_size
            return losses.uld(logits, scores, None, teacher_vocab_size=size, missing=family.missing, **width, **common)
        divergence: Any = "jsd" if family.name == "jsd" else ("reverse" if family.reverse else "forward")
        return losses.same_vocab_kl(logits, scores, divergence=divergence, missing=family.missing, **width, **common)

    def rows(self, scores: TeacherScores, batch: Mapping[str, Any], scale: float) -> tuple[Any, Any]:
        """The term for the fused head: its RowLoss, and what turns an evaluated one into parts."""
        from spanwise.xtoken.losses.gold import gold_parts, gold_rows
        from spanwise.xtoken.losses.prefix import prefix_parts, prefix_rows
        from spanwise.xtoken.losses.projected import projected_parts, projected_rows

        family, plan, helper = self.family, self.plan(batch), self._helper_for(batch["input_ids"])
        common: dict[str, Any] = {"temperature": self.temperature, "reverse": family.reverse, "scale": scale}
        common["missing"] = family.missing
        if family.name == "prefix_kl":
            return prefix_rows(plan, scores, helper, keep=family.keep, min_mass=family.min_mass, **common), prefix_parts
        if family.name == "projected_kl":
            return projected_rows(plan, scores, helper, vocab_topk=family.vocab_topk, **common), projected_parts
        relaxed = family.name == "h_kl"
        rows = gold_rows(plan, scores, helper, relaxed=relaxed, uncommon_topk=family.uncommon_topk, **common)
        return rows, gold_parts

    def _helper_for(self, like: Tensor) -> Any:
        """The trie or projection on the device of ``like``."""
        if self.helper is not None and self.helper_device != str(like.device):
            self.helper = self.helper.to(like.device)
            self.helper_device = str(like.device)
        return self.helper

    def coverage(self, batch: Mapping[str, Any]) -> tuple[int, float | None]:
        """Chunks of a batch, and the share of student tokens that sit in a correct chunk."""
        if self.family.name in SAME_TOKENIZER:
            return int(batch["token_mask"].sum()), 1.0
        correct = batch[f"alignment_{self.index}_pair_is_correct"] & batch[f"alignment_{self.index}_pair_valid"]
        chunk = batch[f"alignment_{self.index}_student_chunk_id"]
        inside = torch.gather(correct, 1, chunk.clamp(min=0)) & (chunk >= 0)
        real = batch["token_mask"] != 0
        return int(batch[f"alignment_{self.index}_num_chunks"].sum()), float(
            (inside & real).sum() / real.sum().clamp(min=1)
        )


def make_term(
    index: int,
    family: LossFamily,
    teacher: Teacher,
    *,
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    projection: str | None,
    temperature: float,
) -> TeacherTerm:
    """A term, with what its family prepares once per pair of tokenizers; what cannot work is refused by name."""
    aligner = make_aligner(index, family, teacher.name, student_tokenizer, teacher_tokenizer, projection)
    if not FORMS[family.name] & teacher.forms:
        raise ValueError(
            f"teacher {index} ({teacher.name}) gives {', '.join(sorted(teacher.forms))} scores and the loss "
            f"'{family.name}' needs {' or '.join(sorted(FORMS[family.name]))}. Fix: set its loss to alm, which needs "
            "one log-probability per token, or use a teacher that gives more."
        )
    return TeacherTerm(
        index,
        family,
        teacher,
        teacher_tokenizer,
        aligner,
        len(student_tokenizer),
        temperature,
        _prepare(family, student_tokenizer, teacher_tokenizer, projection),
    )


def make_aligner(
    index: int, family: LossFamily, name: str, student_tokenizer: Any, teacher_tokenizer: Any, projection: str | None
) -> Any:
    """The aligner between the student and a teacher; None for a loss that compares equal tokens."""
    from spanwise.spans.table import tokenizer_fingerprint
    from spanwise.xtoken import TokenAligner

    if family.name not in SAME_TOKENIZER:
        return TokenAligner(student_tokenizer, teacher_tokenizer, projection, byte_offsets=True)
    if tokenizer_fingerprint(student_tokenizer) != tokenizer_fingerprint(teacher_tokenizer):
        raise ValueError(
            f"teacher {index} ({name}) has another tokenizer than the student and the loss '{family.name}'; "
            "expected a cross-tokenizer loss. Fix: set its loss to prefix_kl."
        )
    return None


def _prepare(family: LossFamily, student_tokenizer: Any, teacher_tokenizer: Any, projection: str | None) -> Any:
    if family.name == "prefix_kl":
        from spanwise.xtoken.losses.trie import PrefixTrie

        return PrefixTrie.from_tokenizers(student_tokenizer, teacher_tokenizer)
    if family.name not in NEEDS_PROJECTION:
        return None
    from spanwise.xtoken.projection_build import build_projection
    from spanwise.xtoken.projection_file import load_projection

    if projection is None:
        return build_projection(student_tokenizer, teacher_tokenizer)
    return load_projection(projection, student=student_tokenizer, teacher=teacher_tokenizer)
