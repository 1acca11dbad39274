"""Filling in MASK: step by step, never with a forward that fills nothing.

A step asks the model for the logits of the candidates alone, draws tokens, and keeps some of them: a share chosen at
random, the surest, or those within a risk. Rows that are done leave the batch. Forwards per row are at most
min(max_steps, hidden positions). With a cache only the block being filled is run (see :mod:`spanwise.mlm.cache`).
Cost: forwards × (body on the rows left + head on the candidates).

Shapes: B rows, S width (prompt and new tokens), M candidates, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spanwise.mlm.backbones import as_mlm_model, score
from spanwise.mlm.cache import KeyValueCache
from spanwise.mlm.checks import token_ids
from spanwise.mlm.evaluating import evaluating
from spanwise.mlm.generation import ORDER_STREAM, REMASK_STREAM, REVEAL_STREAM, TOKEN_STREAM, Generation
from spanwise.mlm.history import HistoryPluginBase
from spanwise.mlm.loss import check_vocabulary
from spanwise.mlm.model import RotaryTransformerMLMModel
from spanwise.mlm.noise import NoiseSchedule, hidden_share
from spanwise.mlm.order import by_factor, by_quota, by_threshold, confidence_of
from spanwise.mlm.sampling import TokenSampler, forbid
from spanwise.mlm.special_tokens import mask_token_id
from spanwise.mlm.types import MLMPredictionDict, MLMStepResults


class MLMPredictor(nn.Module):
    """Fill MASK tokens of a batch.

    Args:
        max_steps: the most forwards a row may take, at least 1; the last fills whatever is left.
        max_new_tokens: append that many MASK tokens to every row.
        tokenizer, model: may also be set later. ``model`` is anything :func:`as_mlm_model` takes.
        noise_schedule: the pace of ``ddpm_cache`` and ``remasking``; None is linear.
        top_k, top_p: keep the likeliest tokens; at most one of the two.
        skip_special_tokens: for the decoded text.
        temperature: of token sampling; 0 is greedy.
        top_p_rule: ``inclusive`` keeps the token that crosses top_p; ``exclusive`` is the reference's rule.
        confidence: ``top_prob``, ``prob_diff`` (margin) or ``entropy``: fill the surest positions first. None: at
            random.
        threshold: with confidence: fill while the accumulated risk stays below it, at least one position per step.
        factor: fill the most positions n with (n + 1)·(1 - confidence of the n-th) < factor.
        ddpm_cache: reveal each position at its own random time; steps that reveal nothing cost no forward.
        remasking: hide filled positions again with up to this probability per step, so that they may be corrected.
        block_size: fill blocks of that many positions from left to right.
        cache: with block_size: ``prefix`` keeps what lies before the block, ``dual`` also what lies behind it.
        suppress_tokens: ids that are never drawn; MASK never is.
        logits_hook: a change of the logits of whole rows (:class:`LogitsShiftBy1`).
        history: is told of the rows before the first and after every step.

    >>> from types import SimpleNamespace
    >>> tokenizer = SimpleNamespace(mask_token_id=1, batch_decode=lambda ids, **_: [str(row) for row in ids.tolist()])
    >>> model = RotaryTransformerMLMModel(8, 8, 1, 1, rotary_emb_dim=8)
    >>> out = MLMPredictor(2, tokenizer=tokenizer, model=model).predict({"input_ids": torch.tensor([[5, 1, 1, 1]])})
    >>> out["steps_taken"], bool((out["ids"] == 1).any())
    ([2], False)
    """

    def __init__(
        self,
        max_steps: int,
        max_new_tokens: int | None = None,
        tokenizer: Any = None,
        model: Any = None,
        noise_schedule: NoiseSchedule | None = None,
        top_k: int | None = None,
        top_p: float | int | None = None,
        skip_special_tokens: bool = True,
        *,
        temperature: float | int = 1.0,
        top_p_rule: str = "inclusive",
        confidence: str | None = None,
        threshold: float | int | None = None,
        factor: float | int | None = None,
        ddpm_cache: bool = False,
        remasking: float | int | None = None,
        block_size: int | None = None,
        cache: str | None = None,
        suppress_tokens: Sequence[int] = (),
        logits_hook: Callable[[Tensor], Tensor] | None = None,
        history: HistoryPluginBase | None = None,
    ) -> None:
        super().__init__()
        self.max_steps, self.max_new_tokens = max_steps, max_new_tokens
        self.tokenizer, self.model = tokenizer, model
        self.noise_schedule = noise_schedule
        self.skip_special_tokens = skip_special_tokens
        self.sampler = TokenSampler(temperature, top_k, top_p, top_p_rule)
        self.confidence = "prob_diff" if confidence == "margin" else confidence
        self.threshold, self.factor = threshold, factor
        self.ddpm_cache, self.remasking = ddpm_cache, remasking
        self.block_size, self.cache = block_size, cache
        self.suppress_tokens = tuple(suppress_tokens)
        self.logits_hook, self.history = logits_hook, history
        self._check_options()
        if factor is not None and self.confidence is None:
            self.confidence = "top_prob"

    def predict(
        self,
        batch: Mapping[str, Any],
        batch_idx: int | None = None,
        dataloader_idx: int | None = None,
        dataloader_name: str | None = None,
        *,
        seed: int = 0,
    ) -> MLMPredictionDict:
        """Fill every MASK of ``batch["input_ids"]`` and of the appended tokens; the batch is not changed.

        Args:
            batch: ``input_ids`` [B, L]; ``attention_mask`` [B, L] (None: all); ``idx`` [B], the keys of the rows'
                random numbers (None: the place in the batch).
            seed: the same seed and key give the same row, whatever its neighbours.
        """
        started = time.perf_counter()
        model = self._ready_model()
        run = self._start(batch, model, seed)
        seconds = [0.0] * len(run.x)
        with evaluating(model):
            forwards = self._run(run, model, seconds, started)
        text, ids = self.decode({"x": run.x})
        steps = run.steps_taken.tolist()
        filled = run.asked.sum(1).tolist()
        return {
            "loss": None,
            "text": text,
            "ids": ids,
            "time_taken": seconds,
            "output_start_idx": torch.full((len(ids),), batch["input_ids"].shape[1], dtype=torch.long),
            "steps_taken": steps,
            "tokens_per_forward": [n / s if s else 0.0 for n, s in zip(filled, steps, strict=True)],
            "forwards": forwards,
        }

    def decode(self, results: MLMStepResults) -> tuple[list[str], Tensor]:
        """Texts and ids of ``results["x"]``; rows are decoded whole, so characters split over tokens come out right."""
        if self.tokenizer is None:
            raise ValueError(_missing("tokenizer"))
        x = results["x"]
        texts: list[str] = []
        if len(x):  # of no rows transformers makes one empty text
            texts = self.tokenizer.batch_decode(x, skip_special_tokens=self.skip_special_tokens)
        return texts, x

    def _run(self, run: Generation, model: Any, seconds: list[float], started: float) -> int:
        forwards, number, told = 0, 0, 0
        reveal = self._reveal_steps(run) if self.ddpm_cache or self.remasking is not None else None
        self._tell(run, None, told)
        while bool(run.hidden.any()):
            number += 1
            active = run.hidden.any(1)
            candidates = self._candidates(run, reveal, number)
            if bool(candidates.any()):
                forwards += 1 + self._mixed(run, candidates)
                logits = forbid(self._logits(run, model, candidates), [run.mask, *self.suppress_tokens])
                self._fill(run, candidates, logits)
                told += 1  # with remasking a step may fill nothing, and a history has no gaps
                self._tell(run, (candidates, logits), told)
            if self.remasking is not None:
                self._remask(run, number)
            now = time.perf_counter() - started
            for row in (active & ~run.hidden.any(1)).nonzero().flatten().tolist():
                seconds[row] = now
        return forwards

    def _candidates(self, run: Generation, reveal: Tensor | None, number: int) -> Tensor:
        """The positions whose logits this step needs. At random, and with reveal times, just those it fills."""
        hidden = run.hidden
        if reveal is not None and self.remasking is None:
            due = torch.where(hidden, reveal, self.max_steps + 1)
            return hidden & (due == due.min(1, keepdim=True).values)
        if self.remasking is not None:
            return hidden & (run.uniform(REVEAL_STREAM + 8 * number, by_step=False) < self._pace(run, number)[0])
        last = run.steps_left <= 1
        paced = self.threshold is None and self.factor is None
        least = run.quota() if paced else torch.where(last, hidden.sum(1), hidden.any(1).long())
        if self.block_size is not None:
            run.next_blocks(self.block_size, least)
            hidden = hidden & run.block
        if self.confidence is not None:
            return hidden
        row = hidden.nonzero()[:, 0]
        chosen = hidden.clone()
        chosen[hidden] = by_quota(row, run.uniform(ORDER_STREAM, by_step=False)[hidden], least)
        return chosen

    def _fill(self, run: Generation, candidates: Tensor, logits: Tensor) -> None:
        tokens = self.sampler(logits, run.uniform(TOKEN_STREAM)[candidates])
        accepted = candidates.clone()
        if self.confidence is not None:
            row = candidates.nonzero()[:, 0]
            confidence = confidence_of(logits, self.confidence)
            if self.threshold is not None:
                keep = by_threshold(row, confidence, self.confidence, self.threshold)
            elif self.factor is not None:
                keep = by_factor(row, confidence, self.factor)
            else:
                keep = by_quota(row, confidence, run.quota())
            keep = keep | (run.steps_left <= 1)[row]
            accepted[candidates] = keep
            tokens = tokens[keep]
        run.steps_taken += candidates.any(1)
        run.fill(accepted, tokens)

    def _logits(self, run: Generation, model: Any, candidates: Tensor) -> Tensor:
        rows = candidates.any(1).nonzero().flatten()
        if self.cache is None:
            taken = slice(None) if len(rows) == len(candidates) else rows
            return score(
                model, run.x[taken], run.attended[taken], run.positions[taken], candidates[taken],
                logits_hook=self.logits_hook,
            )  # fmt: skip
        if run.cache is None:
            run.cache = KeyValueCache(run.attended)
        parts = []
        for kind, chosen in ((True, rows[run.stale[rows]]), (False, rows[~run.stale[rows]])):
            if len(chosen):
                call = self._refresh if kind else self._continue
                parts.append((candidates.nonzero()[:, 0], chosen, call(run, model, candidates, chosen)))
        if len(parts) == 1:
            return parts[0][2]
        merged = parts[0][2].new_empty(int(candidates.sum()), parts[0][2].shape[-1])
        for row_of, chosen, logits in parts:
            merged[torch.isin(row_of, chosen)] = logits
        return merged

    def _refresh(self, run: Generation, model: Any, candidates: Tensor, rows: Tensor) -> Tensor:
        logits: Tensor = model.refresh(run.x[rows], run.positions[rows], candidates[rows], run.cache, rows)
        return logits

    def _continue(self, run: Generation, model: Any, candidates: Tensor, rows: Tensor) -> Tensor:
        """Run from the block's first column to its last (``prefix``: to the end), given tokens between gaps included.

        Columns are gathered to the left; what fills up goes to the cache's spare column.
        """
        block = run.block[rows].long()
        begun, rest = block.cumsum(1) > 0, block.flip(1).cumsum(1).flip(1) > 0
        block = (begun if self.cache == "prefix" else begun & rest) & run.attended[rows]
        width = int(block.sum(1).max())
        columns = torch.argsort(~block, dim=1, stable=True)[:, :width]
        valid = block.gather(1, columns)
        ids, positions = run.x[rows].gather(1, columns), run.positions[rows].gather(1, columns)
        where = candidates[rows].gather(1, columns) & valid
        spare = torch.where(valid, columns, run.x.shape[1])
        logits: Tensor = model.continue_block(ids, positions, spare, where, run.cache, rows)
        return logits

    def _mixed(self, run: Generation, candidates: Tensor) -> int:
        """1 where a cached step needs two calls: some rows begin a block, others continue theirs."""
        if self.cache is None:
            return 0
        stale = run.stale[candidates.any(1)]
        return int(bool(stale.any()) and not bool(stale.all()))

    def _reveal_steps(self, run: Generation) -> Tensor:
        """The step in 1…max_steps at which each position is revealed: the first whose hidden share is below its
        draw."""
        times = 1 - torch.arange(1, self.max_steps + 1, device=run.x.device).double() / self.max_steps
        share = hidden_share(self.noise_schedule, times)[0]
        share[-1] = 0.0
        draw = run.uniform(REVEAL_STREAM, by_step=False)
        return torch.searchsorted(-share, -draw).clamp(max=self.max_steps - 1) + 1

    def _pace(self, run: Generation, number: int) -> tuple[Tensor, Tensor]:
        """Per row [B, 1]: the probability to reveal a hidden position and to hide a filled one again (ReMDM,
        capped)."""
        steps = run.limit.clamp(min=1).double()[:, None]
        before = 1 - hidden_share(self.noise_schedule, (1 - (number - 1) / steps).clamp(min=0))[0]
        after = 1 - hidden_share(self.noise_schedule, (1 - number / steps).clamp(min=0))[0]
        again = torch.minimum(torch.full_like(after, self.remasking or 0.0), (1 - after) / before.clamp(min=1e-9))
        again = torch.where(after < 1, again, torch.zeros_like(again))
        reveal = (after - (1 - again) * before) / (1 - before).clamp(min=1e-9)
        return torch.where(number >= steps, torch.ones_like(reveal), reveal), again

    def _remask(self, run: Generation, number: int) -> None:
        filled = run.asked & ~run.hidden & (number < run.limit)[:, None] & run.hidden.any(1, keepdim=True)
        draw = run.uniform(REMASK_STREAM + 8 * number, by_step=False)
        run.x[filled & (draw < self._pace(run, number)[1])] = run.mask

    def _start(self, batch: Mapping[str, Any], model: Any, seed: int) -> Generation:
        prompt = token_ids(batch, ("attention_mask",))
        mask = mask_token_id(self.tokenizer)
        new = self.max_new_tokens or 0
        x = torch.cat([prompt, prompt.new_full((len(prompt), new), mask)], dim=1)
        given = batch.get("attention_mask")
        attended = torch.ones_like(prompt, dtype=torch.bool) if given is None else given.to(prompt.device) != 0
        attended = torch.cat([attended, attended.new_ones(len(prompt), new)], dim=1)
        keys = batch.get("idx")
        keys = torch.arange(len(x)) if keys is None else torch.as_tensor(keys, dtype=torch.long)
        if keys.shape != (len(x),):
            raise ValueError(
                f"idx of shape {tuple(keys.shape)} came with {len(x)} rows; expected one key for each row, since its "
                "random numbers follow from it. The batch was probably cut without it. Fix: cut idx as well, or leave "
                "it out."
            )
        run = Generation(x, attended, mask, keys, seed, self.max_steps)
        longest = int(run.attended.sum(1).max()) if run.attended.numel() else 0
        room = getattr(model, "max_length", None)
        if room is not None and longest > room:
            raise ValueError(
                f"a row has {longest} tokens, {new} of them new; expected at most {room}, the length of the model. The "
                "prompt is probably too long for it. Fix: cut the prompt on the left, lower max_new_tokens, or use a "
                "model with a larger max_length."
            )
        return run

    def _ready_model(self) -> Any:
        for name in ("model", "tokenizer"):
            if getattr(self, name) is None:
                raise ValueError(_missing(name))
        model = as_mlm_model(self.model)
        check_vocabulary(model, self.tokenizer)
        if self.cache is not None and not isinstance(model, RotaryTransformerMLMModel):
            raise ValueError(
                f"cache={self.cache!r} was asked of a {type(model).__name__}; expected a "
                "RotaryTransformerMLMModel, which can run a part of its rows. Other backbones have no such call. "
                "Fix: pass cache=None."
            )
        return model

    def _tell(self, run: Generation, scored: tuple[Tensor, Tensor] | None, number: int) -> None:
        if self.history is not None:
            self.history.observe(run.x, scored, number, self.max_new_tokens)

    def _check_options(self) -> None:
        problem, fix = "", ""
        drawn = self.ddpm_cache or self.remasking is not None
        if self.max_steps < 1:
            problem, fix = f"max_steps={self.max_steps}", "pass at least 1: without a step nothing could be filled"
        elif self.max_new_tokens is not None and self.max_new_tokens < 0:
            problem, fix = f"max_new_tokens={self.max_new_tokens}", "pass 0 or more, or None"
        elif self.confidence not in (None, "top_prob", "prob_diff", "entropy"):
            problem, fix = f"confidence={self.confidence!r}", "pass 'top_prob', 'prob_diff' (or 'margin') or 'entropy'"
        elif self.threshold is not None and (self.confidence is None or self.factor is not None):
            problem, fix = "threshold without confidence, or beside factor", "pass confidence='top_prob', factor=None"
        elif self.factor is not None and self.confidence not in (None, "top_prob"):
            problem, fix = f"factor beside confidence={self.confidence!r}", "leave confidence out"
        elif drawn and (self.confidence or self.factor or self.block_size or (self.ddpm_cache and self.remasking)):
            problem, fix = "ddpm_cache or remasking beside another order", "pass only one of them"
        elif self.remasking is not None and not 0 <= self.remasking <= 1:
            problem, fix = f"remasking={self.remasking}", "pass a probability"
        elif self.block_size is not None and self.block_size < 1:
            problem, fix = f"block_size={self.block_size}", "pass at least 1, or None for one block"
        elif self.cache is not None and (self.block_size is None or self.cache not in ("prefix", "dual")):
            problem, fix = f"cache={self.cache!r} with block_size={self.block_size}", "pass cache='dual', block_size=8"
        elif self.cache is not None and self.logits_hook is not None:
            problem, fix = "cache beside logits_hook", "pass cache=None: a hook needs the logits of whole rows"
        if problem:
            raise ValueError(
                f"MLMPredictor was given {problem}; expected options that describe one way of filling. Two "
                f"recipes were probably merged, or 0 was meant as off. Fix: {fix}."
            )


def _missing(name: str) -> str:
    return (
        f"the predictor has no {name}; expected one by now. It may be set after construction and was probably "
        f"forgotten. Fix: MLMPredictor(…, {name}={name}), or predictor.{name} = {name}."
    )
