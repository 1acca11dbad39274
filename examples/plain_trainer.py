"""The same inside a plain transformers.Trainer: our collator, our losses, nothing else of ours.

    python examples/plain_trainer.py [STEPS]

The collator's batch reaches ``compute_loss`` whole because unused columns are kept. This uses per-batch means; for
counts that stay right under gradient accumulation and several processes use ``spanwise train``.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
trie = PrefixTrie.from_tokenizers(tokenizer, teacher_tokenizer)
collator = CrossTokenizerCollator(
    student_tokenizer=tokenizer,
    teacher_tokenizer=teacher_tokenizer,
    aligner=TokenAligner(tokenizer, teacher_tokenizer, byte_offsets=True),
    ctx_length_student=256,
    ctx_length_teacher=512,
    padding="longest",
    byte_offsets=True,
)


class DistillTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**model_inputs(inputs)).logits
        scores = teacher.score(request_from_batch(inputs, "teacher_", top_k=64))
        kd = prefix_kl(logits, scores, trie=trie, plan=prefix_plan_of_batch(inputs, trie))
        ce = next_token_ce(logits, plan=token_plan_of_batch(inputs))
        loss = 0.5 * kd.mean() + 0.5 * ce.mean()
        return (loss, {}) if return_outputs else loss


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=5,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    rows = [{"text": text, "idx": i, "loss_multiplier": 1.0} for i, text in enumerate(texts)]
    result = DistillTrainer(student, arguments, data_collator=collator, train_dataset=rows).train()
    print(f"mean loss over {result.global_step} steps: {result.training_loss:.3f}")
