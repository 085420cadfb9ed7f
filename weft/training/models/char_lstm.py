"""A character model: embedding, LSTM, linear."""

from typing import final

from torch import Tensor, nn

from weft.specs import TaskSpec
from weft.training.models.checks import check_dropout, check_positive, check_token_task

__all__ = ["char_lstm"]


def char_lstm(
    task: TaskSpec, *, embedding: int = 32, hidden: int = 128, num_layers: int = 1, dropout: float = 0.0
) -> nn.Module:
    """Tokens [batch, length] -> logits of the next token [batch, length, num_outputs]; any length.

    Args:
        embedding: the size of a token's vector.
        hidden: the size of each layer's state.
        dropout: the share of values that training leaves out between layers.
    """
    check_token_task(task, "char_lstm")
    check_positive(embedding=embedding, hidden=hidden, num_layers=num_layers)
    check_dropout(dropout)
    return _CharLSTM(task.num_outputs, embedding, hidden, num_layers, dropout)


@final
class _CharLSTM(nn.Module):
    def __init__(self, vocabulary: int, embedding: int, hidden: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        # nn.LSTM drops out between its layers only, and warns when there is nothing between.
        between = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(embedding, hidden, num_layers, dropout=between, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits
