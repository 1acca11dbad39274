"""The losses on a CUDA device equal the losses on the CPU."""

from __future__ import annotations

import pytest
import torch

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses import next_token_ce, prefix_kl
from tests.xtoken import test_loss_prefix
from tests.xtoken.cases import Case, random_case
from tests.xtoken.test_loss_edges import LOSSES

pytestmark = pytest.mark.gpu


def on_cuda(alignment: AlignmentBatch) -> AlignmentBatch:
    return AlignmentBatch(**{name: None if t is None else t.cuda() for name, t in vars(alignment).items()})


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("autocast", [False, True])
def test_chunk_losses(which: str, autocast: bool) -> None:
    from spanwise.xtoken.losses import alm, gold, projected_kl, uld

    case = random_case(10, batch=3, s=12, t=12, chunks=9, dtype=torch.float32)

    def value(case: Case, ids: torch.Tensor) -> torch.Tensor:
        scores = TeacherScores(logits=case.y)
        if which == "projected":
            return projected_kl(case.z, scores, case.alignment, case.projection, vocab_topk=6).total
        if which in ("gold", "hkl"):
            return gold(case.z, scores, case.alignment, case.projection, relaxed=which == "hkl").total
        if which == "uld":
            return uld(case.z, scores, case.alignment).total
        return alm(case.z, scores, case.alignment, student_input_ids=ids, teacher_input_ids=ids).total

    ids = torch.zeros(3, 12, dtype=torch.long)
    here = value(case, ids)
    (wanted,) = torch.autograd.grad(here, case.z)
    there = Case(
        case.z.detach().cuda().requires_grad_(), case.y.cuda(), on_cuda(case.alignment), case.projection.to("cuda"),
        case.sample_mask.cuda(),
    )  # fmt: skip
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        total = value(there, ids.cuda())
        (got,) = torch.autograd.grad(total, there.z)
    torch.testing.assert_close(total.cpu(), here.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_prefix_kl_and_cross_entropy() -> None:
    alignment, ids_s, ids_t, *_ = test_loss_prefix.batch([b"abcabca", b"caab"])
    trie = test_loss_prefix.trie()
    g = torch.Generator().manual_seed(0)
    z = torch.randn(*ids_s.shape, 9, generator=g)
    scores = TeacherScores(logits=torch.randn(*ids_t.shape, 9, generator=g)).topk(5)
    here = prefix_kl(z, scores, alignment, trie=trie, student_input_ids=ids_s, teacher_input_ids=ids_t)
    there = prefix_kl(
        z.cuda(), scores.to("cuda"), on_cuda(alignment), trie=trie.to("cuda"), student_input_ids=ids_s.cuda(),
        teacher_input_ids=ids_t.cuda(),
    )  # fmt: skip
    torch.testing.assert_close(there.total.cpu(), here.total)
    torch.testing.assert_close(next_token_ce(z.cuda(), ids_s.cuda()).total.cpu(), next_token_ce(z, ids_s).total)
