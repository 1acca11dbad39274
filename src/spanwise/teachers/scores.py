"""TeacherScores: what a teacher says about a batch, in whatever form it could be had.

Every entry at position t speaks about token t + 1, as logits do; the last position of a row therefore speaks about
nothing that the batch holds. Four forms, exactly one of which is filled:

- **dense** ``logits``: any temperature can still be asked for. O(B·T·V) memory.
- **top-k** ``top_ids``, ``top_logp``, ``log_tail``: the k likeliest tokens and the log of the mass of all others, at
  the one temperature they were taken at. O(B·T·k): what caches and servers carry.
- **shared** ``shared_ids``, ``columns``: one set of ids per document and the logits of those columns. O(B·T·k): what
  projected KL reads, with values identical to the dense form.
- **observed only**: one log-probability per token, for the losses that need no vocabulary. O(B·T).

Shapes: B rows, T teacher length, V teacher vocabulary, K top-k, D documents (D = B unless packed), N rows picked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from spanwise.teachers.score_rows import Missing, pick, pick_listed, pieces, spread
from spanwise.teachers.softmax import safe_log_softmax, tempered

Form = Literal["dense", "topk", "shared", "observed"]


@dataclass(frozen=True)
class TeacherScores:
    """Scores of one teacher for one batch; entry t speaks about token t + 1.

    Attributes:
        logits: raw logits, any floating dtype; -inf is allowed.
        top_ids: token ids by falling probability, -1 for an empty slot.
        top_logp: their log-probabilities at ``temperature``; ignored where the id is -1.
        log_tail: log of the mass of all tokens not in ``top_ids``; -inf where nothing is left.
        shared_ids: sorted ids per document.
        columns: the logits of the document's ``shared_ids`` at every position.
        observed_logp: log-probability of the token that follows (log p(token t + 1)); the last column is not read.
        entropy: of the whole distribution, in nats.
        max_probability: of the likeliest token.
        next_word_mass: probability that the next token starts a word (its bytes begin with a space), or ends the text.
        temperature: at which everything but ``logits`` was taken.

    >>> scores = TeacherScores(logits=torch.zeros(1, 2, 4)).topk(2)
    >>> scores.form, [round(v, 4) for v in scores.log_tail.exp().flatten().tolist()]
    ('topk', [0.5, 0.5])
    """

    logits: Float[Tensor, "B T V"] | None = None
    top_ids: Int[Tensor, "B T K"] | None = None
    top_logp: Float[Tensor, "B T K"] | None = None
    log_tail: Float[Tensor, "B T"] | None = None
    shared_ids: Int[Tensor, "D k"] | None = None
    columns: Float[Tensor, "B T k"] | None = None
    observed_logp: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None
    max_probability: Float[Tensor, "B T"] | None = None
    next_word_mass: Float[Tensor, "B T"] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"the temperature of the teacher scores is {self.temperature}; expected a positive number. It was "
                "probably read from a field that was left out. Fix: pass the temperature the scores were taken at, 1.0 "
                "for plain log-probabilities."
            )
        groups = {
            "dense (logits)": [self.logits],
            "top-k (top_ids, top_logp, log_tail)": [self.top_ids, self.top_logp, self.log_tail],
            "shared (shared_ids, columns)": [self.shared_ids, self.columns],
        }
        begun = [name for name, parts in groups.items() if any(part is not None for part in parts)]
        whole = [name for name, parts in groups.items() if all(part is not None for part in parts)]
        if len(begun) > 1 or begun != whole or (not begun and self.observed_logp is None):
            given = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
            raise ValueError(
                f"the teacher scores were given {given or 'no tensor'}; expected exactly one whole form: "
                f"{', '.join(groups)}, or observed_logp alone. A field of the form was probably left out, or two forms "
                "were mixed. Fix: pass all fields of one form."
            )

    @property
    def form(self) -> Form:
        """Which of the four forms is filled."""
        if self.logits is not None:
            return "dense"
        if self.top_ids is not None:
            return "topk"
        return "shared" if self.columns is not None else "observed"

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        rows, length = self._any().shape[:2]
        return rows, length

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._any().device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TeacherScores:
        """The same scores with every tensor on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def slice(self, start: int, end: int) -> TeacherScores:
        """Rows ``start`` to ``end`` (exclusive), as views."""
        self._refuse_packed_shared()
        return self._map(lambda tensor: tensor[start:end])

    def select(self, rows: Sequence[int] | Int[Tensor, " n"]) -> TeacherScores:
        """The rows named, in the order named (a copy)."""
        self._refuse_packed_shared()
        return self._map(lambda tensor: tensor[torch.as_tensor(rows, dtype=torch.long, device=tensor.device)])

    def at_temperature(self, temperature: float) -> TeacherScores:
        """These scores, fit for a loss at ``temperature``; an error where they are truncated and it is another one."""
        if self.form == "dense" and self.observed_logp is None:
            return replace(self, temperature=temperature)
        if self.form != "dense" and temperature != self.temperature:
            raise ValueError(
                f"a loss at temperature {temperature:g} was given {self.form} teacher scores taken at "
                f"{self.temperature:g}; expected equal temperatures, since the mass of what was left out is only "
                "known at the one the scores were taken at. The teacher was probably cached or served with its "
                f"default. Fix: take the scores at {temperature:g}, or set the loss's temperature to "
                f"{self.temperature:g}."
            )
        return self

    def log_probabilities(
        self, rows: Int[Tensor, " N"], width: int, temperature: float, missing: Missing = "tail_bucket"
    ) -> Float[Tensor, "N width"]:
        """Full-vocabulary log-probabilities of some positions, float32 (float64 for float64 scores).

        Args:
            rows: positions counted through the batch (row · T + position).
            width: the tokenizer's size; a wider head is cut before the softmax.
            temperature: of the softmax; must be the stored one for top-k scores.
            missing: what top-k scores say about the ids they do not list: ``"tail_bucket"`` shares the tail's mass
                evenly among them, ``"renormalise"`` gives them none. Dense scores have none missing.
        """
        self.at_temperature(temperature)
        if self.logits is not None:
            self.check_width(width)
            return safe_log_softmax(tempered(pick(self.logits, rows, width), temperature))
        if self.top_ids is None or self.top_logp is None or self.log_tail is None:
            raise ValueError(
                f"a loss over the whole vocabulary was given teacher scores of the form '{self.form}'; expected dense "
                "or top-k scores. The teacher was probably asked for another loss. Fix: ask it for logits or top-k, "
                "or use the loss this form is for (shared: projected_kl, observed: alm)."
            )
        return spread(*pick_listed(self.top_ids, self.top_logp, self.log_tail, rows, width), width, missing)

    def listed_at(
        self, rows: Int[Tensor, " N"], width: int
    ) -> tuple[Int64[Tensor, "N K"], Float[Tensor, "N K"], Float[Tensor, " N"]]:
        """What top-k scores say about some positions: ids (-1 where there is no mass), their mass, that of all others.

        Args:
            rows: positions counted through the batch (row · T + position).
            width: the tokenizer's size; ids beyond it are refused.
        """
        if self.top_ids is None or self.top_logp is None or self.log_tail is None:
            raise ValueError(
                f"listed tokens were asked of teacher scores of the form '{self.form}'; expected top-k scores. Fix: "
                "scores.topk(k), or log_probabilities(…) for dense ones."
            )
        ids, logp, tail = pick_listed(self.top_ids, self.top_logp, self.log_tail, rows, width)
        mass = logp.exp().masked_fill(ids < 0, 0.0)
        return ids.masked_fill(mass <= 0, -1), mass, tail.exp()

    def columns_at(self, rows: Int[Tensor, " N"], ids: Int[Tensor, " k"]) -> Float[Tensor, "N k"]:
        """Some logits of some positions (row · T + position), float32 (float64 for float64 scores)."""
        logits = self._dense("columns_at").detach()
        length, width = logits.shape[1:]
        if logits.is_contiguous():
            place = (rows[:, None] * width + ids).view(-1)
            picked = logits.view(-1).index_select(0, place).view(len(rows), len(ids))
        else:
            picked = logits[(rows // length)[:, None], (rows % length)[:, None], ids]
        return picked.to(torch.promote_types(logits.dtype, torch.float32))

    def check_width(self, width: int) -> None:
        """Refuse a dense head narrower than the teacher's tokenizer (a wider one is cut where it is read)."""
        if self.logits is not None and self.logits.shape[-1] < width:
            raise ValueError(
                f"the teacher's head scores {self.logits.shape[-1]:,} tokens and its side of the vocabulary has "
                f"{width:,}; expected a head at least as wide. The projection or the tokenizer probably belongs to "
                "another teacher. Fix: rebuild it: spanwise project build STUDENT TEACHER -o FILE."
            )

    def topk(self, k: int, *, temperature: float = 1.0, width: int | None = None) -> TeacherScores:
        """Dense scores cut to the ``k`` likeliest tokens per position and the log of what is left.

        Args:
            k: at most the width.
            temperature: at which the result's log-probabilities are taken.
            width: the tokenizer's size; a wider head is cut first.
        """
        logits = self._dense("topk")
        width = logits.shape[-1] if width is None else width
        self.check_width(width)
        if k < 1:
            raise ValueError(
                f"the {k} likeliest tokens were asked of teacher scores; expected at least 1. It was probably set to 0 "
                "to switch the limit off. Fix: use the dense scores as they are."
            )
        rows, length = logits.shape[:2]
        k = min(k, width)
        compute = torch.promote_types(logits.dtype, torch.float32)
        ids = torch.empty(rows * length, k, dtype=torch.long, device=logits.device)
        logp = torch.empty(rows * length, k, dtype=compute, device=logits.device)
        tail = torch.empty(rows * length, dtype=compute, device=logits.device)
        for piece in pieces(rows * length, width, logits.device):
            log_probabilities = safe_log_softmax(tempered(pick(logits, piece, width), temperature))
            logp[piece], ids[piece] = log_probabilities.topk(k, dim=-1)
            tail[piece] = log_probabilities.scatter_(1, ids[piece], -torch.inf).logsumexp(-1)
        return replace(
            self,
            logits=None,
            top_ids=ids.view(rows, length, k),
            top_logp=logp.view(rows, length, k),
            log_tail=tail.view(rows, length),
            temperature=temperature,
        )

    def share(
        self, shared_ids: Int[Tensor, "D k"], document: Int[Tensor, "B T"] | None = None, *, temperature: float = 1.0
    ) -> TeacherScores:
        """Dense scores cut to the columns of each document's ``shared_ids``.

        Args:
            shared_ids: sorted ids per document.
            document: the document of every position, -1 for none (its columns are 0); default: row i is document i.
            temperature: at which the loss will read them.
        """
        logits = self._dense("share")
        rows, length = logits.shape[:2]
        if document is None:
            document = torch.arange(rows, device=logits.device)[:, None].expand(rows, length)
        ids = shared_ids[document.clamp(min=0)]
        columns = torch.gather(logits, 2, ids).masked_fill((document < 0)[..., None], 0.0)
        return replace(self, logits=None, shared_ids=shared_ids, columns=columns, temperature=temperature)

    def observed(
        self, input_ids: Int[Tensor, "B T"], *, temperature: float = 1.0, width: int | None = None
    ) -> Float[Tensor, "B T"]:
        """Log-probability of the token that follows each position; 0 at the last.

        Top-k scores give -inf for a token they do not list, unless ``observed_logp`` came with them.
        """
        if self.observed_logp is not None and temperature == self.temperature:
            return self.observed_logp
        self.at_temperature(temperature)
        if tuple(input_ids.shape) != self.shape:
            raise ValueError(
                f"input_ids are {tuple(input_ids.shape)} and the teacher scores {self.shape}; expected equal shapes. "
                "They are probably the student's, or of another batch. Fix: pass the teacher's tokens of this batch."
            )
        following = torch.zeros_like(input_ids)
        following[:, :-1] = input_ids[:, 1:]
        if self.top_ids is not None and self.top_logp is not None:
            found = self.top_ids == following[..., None]
            listed = self.top_logp.masked_fill(~found, -torch.inf).amax(-1)
            listed[:, -1] = 0.0
            return listed
        logits = self._dense("observed")
        width = logits.shape[-1] if width is None else width
        self.check_width(width)
        smallest, largest = (int(following.min()), int(following.max())) if following.numel() else (0, 0)
        if smallest < 0 or largest >= width:
            raise ValueError(
                f"input_ids run from {smallest} to {largest:,} and the teacher scores {width:,} tokens; expected ids "
                "from 0 to below that. They are probably the student's, or labels. Fix: pass the teacher's own tokens."
            )
        result = torch.zeros(
            following.numel(), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device
        )
        for piece in pieces(following.numel(), width, logits.device):
            log_probabilities = safe_log_softmax(tempered(pick(logits, piece, width), temperature))
            result[piece] = log_probabilities.gather(1, following.reshape(-1)[piece, None]).squeeze(1)
        result = result.view(following.shape)
        result[:, -1] = 0.0
        return result

    def with_statistics(
        self,
        input_ids: Int[Tensor, "B T"],
        *,
        word_start: Bool[Tensor, " V"] | None = None,
        temperature: float = 1.0,
        width: int | None = None,
    ) -> TeacherScores:
        """Dense scores with ``observed_logp``, ``entropy``, ``max_probability`` (and ``next_word_mass``) filled in.

        Args:
            input_ids: the teacher's tokens.
            word_start: which ids start a word or end the text; without it next_word_mass stays None.
            temperature: of all of them.
            width: the tokenizer's size; a wider head is cut first.
        """
        logits = self._dense("with_statistics")
        width = logits.shape[-1] if width is None else width
        if word_start is not None and len(word_start) < width:
            raise ValueError(
                f"word_start marks {len(word_start):,} tokens and the teacher scores {width:,}; expected a mark for "
                "each. It was probably made for the student. Fix: make it from the teacher's tokenizer."
            )
        observed = replace(self, observed_logp=None).observed(input_ids, temperature=temperature, width=width)
        entropy, largest, mass = (torch.zeros_like(observed).view(-1) for _ in range(3))
        for piece in pieces(entropy.numel(), width, logits.device):
            log_probabilities = safe_log_softmax(tempered(pick(logits, piece, width), temperature))
            largest[piece] = log_probabilities.amax(-1).exp()
            probabilities = log_probabilities.exp()
            if word_start is not None:
                mass[piece] = probabilities[:, word_start[:width]].sum(-1)
            entropy[piece] = -torch.xlogy(probabilities, probabilities).sum(-1)
        return replace(
            self,
            observed_logp=observed,
            entropy=entropy.view_as(observed),
            max_probability=largest.view_as(observed),
            next_word_mass=None if word_start is None else mass.view_as(observed),
            temperature=temperature,
        )

    def _any(self) -> Tensor:
        for tensor in (self.logits, self.top_ids, self.columns, self.observed_logp):
            if tensor is not None:
                return tensor
        raise ValueError(
            "the teacher scores hold no tensor; expected one form. Fix: build them through the constructor."
        )

    def _dense(self, what: str) -> Tensor:
        if self.logits is None:
            raise ValueError(
                f"{what} was asked of teacher scores of the form '{self.form}'; expected dense logits. The scores were "
                "probably truncated before. Fix: ask the teacher for logits, or use the truncated scores as they are."
            )
        return self.logits

    def _map(self, change: Callable[[Tensor], Tensor]) -> TeacherScores:
        changed = {
            f.name: change(getattr(self, f.name)) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)

    def _refuse_packed_shared(self) -> None:
        if self.shared_ids is not None and len(self.shared_ids) != self.shape[0]:
            raise ValueError(
                f"rows were asked of shared-set scores with {len(self.shared_ids)} documents in {self.shape[0]} rows; "
                "expected one document per row. The batch is packed. Fix: slice before packing, or slice the dense "
                "scores."
            )
