"""The other side of benchmarks/mlm.py: xlm-core and xlm-models 0.3.1 in a virtual environment of their own.

Answers commands (``peer_sides/serve.py``); batches follow from seeds alone, so both sides compute the same work. Needs
nothing of Spanwise.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from benchmarks.peer_sides.memory import peak, reset_peak
from benchmarks.peer_sides.serve import serve

VOCABULARY, WIDTH, LAYERS, HEADS = 30522, 384, 4, 6
PAD, MASK = 0, 1


def seeded_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, targets and mask of 8 rows of 16, 32, … 128 tokens, a random share of each hidden."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.arange(16, 129, 16)[torch.randperm(8, generator=generator), None]
    real = torch.arange(128)[None] < lengths
    targets = torch.randint(4, VOCABULARY, (8, 128), generator=generator)
    share = (torch.arange(8)[:, None] + torch.rand(8, 1, generator=generator)) / 8
    hidden = (torch.rand(8, 128, generator=generator) < share) & real
    return targets.masked_fill(~real, PAD).masked_fill(hidden, MASK), targets.masked_fill(~real, -100), real


def measured_step(model: torch.nn.Module, step) -> tuple[float, float]:
    """Seconds of one forward and backward after zero_grad(), and the MB of its activations and logits at their peak.

    The peak is read when the head has run backward: from then on activations are given up and gradients of weights
    take their place. The one such gradient that exists by then, the head's, is subtracted.
    """
    peaks: list[float] = []
    wide = [weight for weight in model.parameters() if weight.shape == (VOCABULARY, WIDTH)]  # head and embedding
    hooks = [weight.register_post_accumulate_grad_hook(lambda _: peaks.append(peak())) for weight in wide]
    model.zero_grad()
    before = reset_peak()
    began = time.process_time()
    step().backward()
    seconds = time.process_time() - began
    for hook in hooks:
        hook.remove()
    return seconds, peaks[0] - before - VOCABULARY * WIDTH * 4 / 2**20


class Reference:
    """Model, loss and predictor of the reference."""

    def __init__(self) -> None:
        from mlm import MLMLoss, MLMPredictor, RotaryTransformerMLMModel

        torch.manual_seed(0)
        self.model = RotaryTransformerMLMModel(VOCABULARY, WIDTH, LAYERS, HEADS, max_length=192)
        tokenizer = SimpleNamespace(mask_token_id=MASK, batch_decode=lambda ids, **_: [""] * len(ids))
        self.loss = MLMLoss(model=self.model, tokenizer=tokenizer)
        self.loss.mask_token_id_tensor = torch.tensor(MASK)
        self.predictor = MLMPredictor(32, 32, tokenizer=tokenizer, model=self.model)

    def train(self, seed: int, dropout: float) -> dict:
        self.model.train()
        for layer in self.model.encoder:
            layer.dropout = dropout
        ids, targets, real = seeded_batch(seed)

        def step() -> torch.Tensor:
            return self.loss({"input_ids": ids, "target_ids": targets.clone(), "attention_mask": real})["loss"]

        seconds, megabytes = measured_step(self.model, step)
        return {"seconds": seconds, "megabytes": megabytes}

    def weights(self, path: str) -> dict:
        """Write the state dict, and the logits of two ragged rows."""
        self.model.eval()
        ids, _, real = (part[:2] for part in seeded_batch(0))
        positions = (real.cumsum(1) - 1).clamp(min=0) * real
        with torch.no_grad():
            logits = self.model(ids, real, positions)
        torch.save({"weights": self.model.state_dict(), "ids": ids, "real": real, "logits": logits}, path)
        return {}

    def generate(self, seed: int) -> dict:
        self.model.eval()
        prompt = torch.randint(4, VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(seed))
        batch = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt, dtype=torch.bool)}
        began = time.process_time()
        with torch.no_grad():
            self.predictor.predict(batch)
        return {"seconds": time.process_time() - began}


if __name__ == "__main__":
    serve(Reference())
