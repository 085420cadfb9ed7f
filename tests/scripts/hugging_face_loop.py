"""A loop of one's own around a model of transformers: padded sequences, and a loss that is a mean over tokens."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

import weft

torch.manual_seed(1)
texts = [torch.randint(1, 20, (int(length),)) for length in torch.randint(3, 15, (46,))]


def collate(batch: list[Tensor]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": words.masked_fill(words == 0, -100)}


def num_tokens(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())  # the model predicts from the second one on


loader: DataLoader[Any] = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
config = GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=3 * len(loader))
model, optimizer, loader = weft.weave(model, optimizer, loader, weight=num_tokens)

for epoch in range(1, 4):
    model.train()
    total, count = 0.0, 0
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total += loss.item() * num_tokens(batch)
        count += num_tokens(batch)
    totals = weft.sum({"loss": total, "count": count})
    weft.print(f"epoch {epoch} loss {totals['loss'] / totals['count']:.4f} tokens {totals['count']}")

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
