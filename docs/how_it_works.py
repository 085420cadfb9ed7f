"""How Weft works, in one file: from a plain training loop to N ranks that end with the bits of one.

    python docs/how_it_works.py

Read it from top to bottom. It uses PyTorch and nothing of Weft; every idea here has its grown-up form in weft/, and the
last comment says where. Ranks are entries of a list and messages are copies, so all of it runs in one process.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor, nn

torch.set_num_threads(1)
Share = tuple[Tensor, Tensor]  # inputs and labels of some samples
Weigh = Callable[[Sequence[nn.Module], Sequence[Share]], list[Tensor]]
Exchange = Callable[[Sequence[Tensor]], object]

# ----------------------------------------------------------------------------------------------------------------------
# 1. One process
#
# A step of training: the gradient of the mean loss over a batch, then an update. To keep the file short the gradient of
# all parameters is one flat vector. The data are random points, labelled by a network that is never trained.


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def make_batches(batch_size: int = 64) -> list[Share]:
    """1000 samples in batches of 64; the last batch has 40."""
    torch.manual_seed(2)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(1000, 8)
    y = teacher(x).argmax(1)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def loss_and_gradient(model: nn.Module, share: Share) -> tuple[float, Tensor]:
    """The mean loss over some samples and its gradient."""
    x, y = share
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item(), torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def update(model: nn.Module, gradient: Tensor, lr: float = 0.5) -> None:
    nn.utils.vector_to_parameters(weights_of(model) - lr * gradient, model.parameters())


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_alone(batches: Sequence[Share], epochs: int = 5) -> tuple[float, float]:
    """The loss of the first and of the last batch."""
    model, losses = make_model(), []
    for batch in [*batches] * epochs:
        loss, gradient = loss_and_gradient(model, batch)
        update(model, gradient)
        losses.append(loss)
    return losses[0], losses[-1]


# ----------------------------------------------------------------------------------------------------------------------
# 2. Micro-batches
#
# The mean over a batch is a weighted sum of the means over its parts, each weighing by its share of the samples:
#
#     mean(a b c d e)  =  2/5 mean(a b)  +  2/5 mean(c d)  +  1/5 mean(e)
#
# The gradient is linear, so the same holds for it, and that is the whole of data parallelism. The weights matter: 64
# samples over 3 ranks are 22, 21 and 21, and a plain average of the three would be another gradient.


def cut(batch: Share, num_ranks: int) -> list[Share]:
    """One share per rank; sizes differ by one at most."""
    x, y = batch
    return list(zip(x.tensor_split(num_ranks), y.tensor_split(num_ranks), strict=True))


def weighted_gradients(models: Sequence[nn.Module], shares: Sequence[Share]) -> list[Tensor]:
    """What each rank brings to the exchange: the gradient of its share, times the weight of its share."""
    total = sum(len(x) for x, _ in shares)
    return [len(s[0]) / total * loss_and_gradient(m, s)[1] for m, s in zip(models, shares, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# 3. The ring
#
# Every rank has a vector and all want the sum. Cut each vector into as many parts as there are ranks. A part walks once
# around the ring, and every rank that it passes adds its own; then the finished part walks around once more:
#
#     part 0 of 3    rank 1 --> rank 2 --> rank 0        reduce: (g1 + g2) + g0
#                    rank 0 --> rank 1 --> rank 2        gather: everybody has it
#
# All parts walk at the same time, each a place ahead of the next, so every link is busy in every round. A rank sends
# 2 (N - 1) parts of 1/N of the vector: never more than two vectors, however many ranks there are.


def ring_all_reduce(vectors: Sequence[Tensor]) -> int:
    """Every vector becomes the sum of all, in place. Returns the bytes that rank 0 sent."""
    size, bytes_sent = len(vectors), 0
    parts = [vector.tensor_split(size) for vector in vectors]  # views: writing to a part writes to its vector

    def one_round(first: int, receive: Callable[[Tensor, Tensor], object]) -> int:
        """Rank r sends part r + first to rank r + 1. All send before anyone receives."""
        letters = [parts[rank][(rank + first) % size].clone() for rank in range(size)]
        for rank in range(size):
            receive(parts[rank][(rank - 1 + first) % size], letters[rank - 1])
        return letters[0].nbytes

    for step in range(size - 1):
        bytes_sent += one_round(-step - 1, Tensor.add_)
    for step in range(size - 1):
        bytes_sent += one_round(-step, Tensor.copy_)
    return bytes_sent


# ----------------------------------------------------------------------------------------------------------------------
# 4. Replicas
#
# Every rank has a model. They start equal, because rank 0 sends its weights to the others; they take shares of the same
# batch; they leave the exchange with the same sum; they make the same update. So they stay equal, to the last bit, and
# nobody ever has to send weights again.


def start_replicas(num_ranks: int, *, broadcast: bool = True) -> list[nn.Sequential]:
    """One model per rank. Every process begins with weights of its own; the broadcast makes them rank 0's."""
    models = [make_model() for _ in range(num_ranks)]
    for rank, model in enumerate(models):
        nn.utils.vector_to_parameters(weights_of(model) + rank, model.parameters())
    if broadcast:
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
    return models


def step_together(
    models: Sequence[nn.Module], batch: Share, weigh: Weigh = weighted_gradients, exchange: Exchange = ring_all_reduce
) -> None:
    """One step of all ranks; section 6 replaces how gradients are weighed and exchanged."""
    gradients = weigh(models, cut(batch, len(models)))
    exchange(gradients)
    for model, total in zip(models, gradients, strict=True):
        update(model, total)


# ----------------------------------------------------------------------------------------------------------------------
# 5. The proof
#
# Do N ranks compute what one rank computes? "About" is no answer: with a share counted twice they also do, about. So
# compare bits. One thing stands in the way: in floating point (a + b) + c is not a + (b + c). The reference must add in
# the order of the ring. Then no excuse is left, and every bit that differs is a bug. The reference is one model that
# takes the shares one after the other, and uses none of the code that it judges: no replicas, no broadcast, no ring.


def rank_order_sum(gradients: Sequence[Tensor]) -> Tensor:
    """((g0 + g1) + g2) + ..."""
    return reduce(torch.add, gradients)


def ring_order_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Part j added up from rank j + 1 around to rank j."""
    parts = [gradient.tensor_split(len(gradients)) for gradient in gradients]
    around = [[rank[j] for rank in (*parts[j + 1 :], *parts[: j + 1])] for j in range(len(parts))]
    return torch.cat([rank_order_sum(walk) for walk in around])


def prove(
    batches: Sequence[Share],
    models: Sequence[nn.Module],
    *,
    step: Callable[[Sequence[nn.Module], Share], None] = step_together,
    add: Callable[[Sequence[Tensor]], Tensor] = ring_order_sum,
) -> str:
    """Train replicas and the reference side by side; says what was shown, or the first difference."""
    reference, worst = make_model(), 0.0
    for number, batch in enumerate(batches, start=1):
        step(models, batch)
        shares = cut(batch, len(models))
        update(reference, add(weighted_gradients([reference] * len(shares), shares)))
        expected, found = weights_of(reference), [weights_of(model) for model in models]
        for rank, vector in enumerate(found):
            if not torch.equal(vector, found[0]):
                return f"FAIL: after step {number} rank {rank} is not rank 0"
        error = ((found[0] - expected).abs().max() / expected.abs().max()).item()
        if not error <= 1e-5:  # not-a-number is a difference too
            return f"FAIL: after step {number} the ranks are off by {error:.0e}"
        worst = max(worst, error)
    how = f"to {worst:.0e}" if worst else "to the last bit"
    return f"PASS: {len(models)} ranks are one rank after each of {len(batches)} steps, {how}"


# ----------------------------------------------------------------------------------------------------------------------
# 6. A proof that cannot fail proves nothing: plant the mistakes that people make, and see that each is caught


def plain_average(models: Sequence[nn.Module], shares: Sequence[Share]) -> list[Tensor]:
    """Right only where all shares have the same size."""
    return [loss_and_gradient(model, share)[1] / len(models) for model, share in zip(models, shares, strict=True)]


def lossy_ring(vectors: Sequence[Tensor]) -> None:
    """The last message to rank 0 is lost, and it keeps what it had of that part."""
    own = vectors[0].tensor_split(len(vectors))[1].clone()
    ring_all_reduce(vectors)
    vectors[0].tensor_split(len(vectors))[1].copy_(own)


def tell(num_ranks: int = 3) -> None:
    batches = make_batches()
    first, last = train_alone(batches)
    print(f"1. one process: loss {first:.3f} at the start, {last:.3f} after five epochs")

    model, shares = make_model(), cut(batches[0], num_ranks)
    whole = loss_and_gradient(model, batches[0])[1]
    error = (whole - rank_order_sum(weighted_gradients([model] * num_ranks, shares))).abs().max()
    print(f"2. {num_ranks} micro-batches: their gradients add up to the whole one, to {error:.0e}")

    vectors = [torch.full((num_ranks * 1000,), float(rank)) for rank in range(num_ranks)]
    times_sent = ring_all_reduce(vectors) / vectors[0].nbytes
    print(f"3. ring: every rank has the sum {vectors[0][0]:g}, and sent {times_sent:.2f} times its vector")

    print(f"4. replicas against one rank, adding alike\n   {prove(batches, start_replicas(num_ranks))}")
    print("5. against one rank that adds in the order of ranks, not of the ring: other roundings")
    print(f"   {prove(batches, start_replicas(num_ranks), add=rank_order_sum)}")
    print("6. planted faults: a plain average, a lost message, no broadcast")
    print(f"   {prove(batches, start_replicas(num_ranks), step=partial(step_together, weigh=plain_average))}")
    print(f"   {prove(batches, start_replicas(num_ranks), step=partial(step_together, exchange=lossy_ring))}")
    print(f"   {prove(batches, start_replicas(num_ranks, broadcast=False))}")


# ----------------------------------------------------------------------------------------------------------------------
# Where to read on
#
#     1  weft/training/loop.py                         a step and the loop around it, every part behind a seam
#     2  weft/training/gradients.py                    micro-batches; weft/training/sampling/partition.py the shares
#     3  weft/distributed/collectives/phases.py        the ring and its relatives, as data that can be drawn and checked
#     4  weft/distributed/placement/exchange.py      buckets that travel while backward still runs
#     5  weft/proving/lockstep.py                     what `weft prove` runs
#
# What this file leaves out, and Weft does not: real processes, a peer that dies, overlap, time.

if __name__ == "__main__":
    tell()
