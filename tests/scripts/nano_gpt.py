"""A small GPT as nanoGPT: random crops drawn by torch.randint, gradient accumulation, clipping, a schedule by hand, and
an evaluation that rank 0 makes alone, with draws of its own."""

import math
import sys

import torch
from torch import Tensor, nn

import weft

NUM_TOKENS, LENGTH, BATCH_SIZE, NUM_MICRO_STEPS, MAX_STEPS = 11, 8, 5, 3, 12
torch.manual_seed(1337)
data = (3 * torch.arange(400) + torch.randint(2, (400,))) % NUM_TOKENS
splits = {"train": data[:300], "val": data[300:]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_TOKENS, 16), nn.Embedding(LENGTH, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, NUM_TOKENS, bias=False)
        self.tokens.weight = self.head.weight  # tied

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits = self.head(self.block(self.tokens(x) + self.places.weight, mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    source = splits[split]
    starts = torch.randint(len(source) - LENGTH, (BATCH_SIZE,))
    x = torch.stack([source[i : i + LENGTH] for i in starts])
    y = torch.stack([source[i + 1 : i + 1 + LENGTH] for i in starts])
    return x, y


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    model.eval()
    found = {split: sum(model(*get_batch(split))[1].item() for _ in range(3)) / 3 for split in splits}
    model.train()
    return found


def learning_rate(step: int) -> float:
    return 3e-2 * min((step + 1) / 3, 0.5 * (1 + math.cos(math.pi * step / MAX_STEPS)))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
model, optimizer, _ = weft.weave(model, optimizer, None)

x, y = weft.share(*get_batch("train"))
for step in range(MAX_STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % 4 == 0 and weft.is_first:
        losses = estimate_loss()
        print(f"step {step} train {losses['train']:.4f} val {losses['val']:.4f}")
    for micro_step in range(NUM_MICRO_STEPS):
        _, loss = model(x, y)
        loss = loss / NUM_MICRO_STEPS
        x, y = weft.share(*get_batch("train"))  # the next batch, before this one's backward
        if micro_step < NUM_MICRO_STEPS - 1:
            with weft.no_sync():
                loss.backward()
        else:
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
