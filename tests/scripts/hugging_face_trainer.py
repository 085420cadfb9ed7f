"""The Trainer of transformers, without a line of Weft: it joins the ranks by RANK, WORLD_SIZE and their like."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
texts = [{"input_ids": text, "labels": text} for text in torch.randint(1, 20, (48, 12))]

config = GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
arguments = TrainingArguments(
    output_dir=os.path.splitext(sys.argv[1])[0],
    per_device_train_batch_size=8 // NUM_RANKS,
    num_train_epochs=2,
    learning_rate=0.1,
    optim="sgd",
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    logging_steps=3,
    disable_tqdm=True,
)


class SameOrder(Trainer):
    """Batches in the order of the data, so that each is the same on every number of ranks."""

    def _get_train_sampler(self, dataset: object = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(texts)


trainer = SameOrder(model=model, args=arguments, train_dataset=texts)
trainer.train()
assert trainer.accelerator.num_processes == NUM_RANKS
backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "nothing"
print(f"{NUM_RANKS} ranks by {backend}", flush=True)

if trainer.is_world_process_zero():
    torch.save(model.state_dict(), sys.argv[1])
