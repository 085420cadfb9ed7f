"""Words as pytorch/examples/word_language_model: columns of text sliced by hand, a hidden state that is carried from
slice to slice, no loader, and no optimizer: parameters are moved by hand."""

import math
import sys

import torch
from torch import Tensor, nn

import weft

NUM_WORDS, LENGTH, LR = 12, 7, 2.0
torch.manual_seed(1)
text = (5 * torch.arange(500) + torch.randint(2, (500,))) % NUM_WORDS
train_data = text[:400].view(5, 80).t()  # 5 columns: two ranks get 3 and 2
val_data = text[400:].view(2, 50).t()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(NUM_WORDS, 8), nn.LSTM(8, 16)
        self.decoder = nn.Linear(16, NUM_WORDS)

    def forward(self, words: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.embedding(words), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def get_batch(source: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    length = min(LENGTH, len(source) - 1 - begin)
    return source[begin : begin + length], source[begin + 1 : begin + 1 + length]


def evaluate() -> float:
    total, hidden = 0.0, None
    with torch.no_grad():
        for begin in range(0, len(val_data) - 1, LENGTH):
            words, targets = get_batch(val_data, begin)
            output, hidden = model(words, hidden)
            total += len(words) * nn.functional.cross_entropy(output, targets.flatten()).item()
    return total / (len(val_data) - 1)


model = Model()
model, _, _ = weft.weave(model, None, None)

for epoch in range(1, 4):
    hidden = None
    for begin in range(0, len(train_data) - 1, LENGTH):
        words, targets = weft.share(*get_batch(train_data, begin), dim=1)
        model.zero_grad()
        hidden = hidden and (hidden[0].detach(), hidden[1].detach())
        output, hidden = model(words, hidden)
        loss = nn.functional.cross_entropy(output, targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-LR)
    weft.print(f"epoch {epoch} perplexity {math.exp(evaluate()):.3f}")

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
