"""A transformer in stages: weft launch --workers 2 examples/train_pipeline.py --plan "pipeline=2"

The loop is that of one process, but for one call: weft.forward_backward in the place of forward, loss and backward.
`python examples/train_pipeline.py` trains the same model in one process.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import weft

LENGTH, VOCABULARY = 24, 16


class Model(nn.Module):
    """Tokens [batch, length] -> logits of the next token [batch, length, vocabulary]."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits: Tensor = self.head(self.blocks(self.tokens(tokens) + self.positions.weight[:length], mask=mask))
        return logits


def make_data(num_samples: int) -> TensorDataset:
    """Sums modulo the vocabulary: every token is the sum of the two before it."""
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for i in range(2, LENGTH + 1):
        tokens[:, i] = (tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="data", help='such as "pipeline=2 schedule=1f1b(8)", or "data=2 pipeline=2"')
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, data = Model(32, args.layers), make_data(args.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model, optimizer, loader = weft.weave(model, optimizer, DataLoader(data, 64, shuffle=True), plan=args.plan)
    for epoch in range(args.epochs):
        for tokens, targets in loader:
            weft.forward_backward(model, loss_of, tokens, targets)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():  # between epochs every rank holds the whole model
            inputs, wanted = data[:128]
            share = (model(inputs).argmax(-1) == wanted)[:, 1:].double().mean().item()
        weft.print(f"epoch {epoch + 1}: {100 * share:.4f}% of tokens right")


if __name__ == "__main__":
    main()
