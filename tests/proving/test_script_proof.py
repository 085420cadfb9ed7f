"""Proofs of scripts: a right one passes, and of one with a planted fault the cause is named."""

from pathlib import Path

import pytest

from tests.small_script import HEAD, LOOP, SCRIPT, run_traced, write_script
from weft.errors import PlanError, UsageError
from weft.proving.script_proof import ScriptProof, check_provable, prove_script
from weft.specs import parse_plan


def prove(folder: Path, text: str, *, num_ranks: int = 2, num_steps: int = 4) -> ScriptProof:
    return prove_script(run_traced(write_script(folder, text)), num_ranks, num_steps=num_steps)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_right_script_passes(tmp_path: Path, num_ranks: int) -> None:
    proof = prove(tmp_path, SCRIPT, num_ranks=num_ranks)
    assert proof.passed and proof.causes == () and proof.num_steps == 4 and proof.largest_error < 1e-5
    assert f"{num_ranks} ranks gave the parameters of one process after each of 4 steps" in proof.finding


def test_a_script_that_ends_early_is_proved_as_far_as_it_goes(tmp_path: Path) -> None:
    proof = prove(tmp_path, SCRIPT, num_steps=50)
    assert proof.passed and proof.num_steps == 6


def test_one_that_sets_no_seed_begins_the_same(tmp_path: Path) -> None:
    assert prove(tmp_path, SCRIPT.replace("torch.manual_seed(1)", "")).passed


def test_dropout_of_every_rank_is_its_own(tmp_path: Path) -> None:
    """Masks of ranks are not those of one process, and should not be."""
    proof = prove(tmp_path, SCRIPT.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.5)"))
    assert proof.passed and "without random numbers" in proof.finding and "after step 1" in proof.finding


def test_noise_of_every_rank_is_its_own(tmp_path: Path) -> None:
    proof = prove(tmp_path, SCRIPT.replace("model(x)", "model(x + torch.randn_like(x))"))
    assert proof.passed and "without random numbers" in proof.finding


def test_equal_random_masks_are_named(tmp_path: Path) -> None:
    text = SCRIPT.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.5)")
    proof = prove(tmp_path, text.replace("        optimizer.zero_grad()", "        torch.manual_seed(3)"))
    assert not proof.passed and [cause.name for cause in proof.causes] == ["equal random masks"]


def test_every_rank_with_the_whole_batch_is_named(tmp_path: Path) -> None:
    """The loader that was woven is not the one that the loop goes over: N copies, with the result of one."""
    text = HEAD.replace(", shuffle=True", "") + "model, optimizer, _ = weft.weave(model, optimizer, loader)" + LOOP
    proof = prove(tmp_path, text)
    assert not proof.passed and [cause.name for cause in proof.causes] == ["unshared batches"]
    assert "every rank was given the same batch" in proof.causes[0].fact


def test_batches_of_every_rank_are_named(tmp_path: Path) -> None:
    own = "import os\nloader = [data[torch.randperm(22)[:8]] for _ in range(3)]"
    text = f"{HEAD}\nmodel, optimizer, _ = weft.weave(model, optimizer, loader)\n{own}{LOOP}"
    text = text.replace("import os\n", "import os\ntorch.manual_seed(int(os.environ['RANK']))\n")
    proof = prove(tmp_path, text)
    assert not proof.passed and [cause.name for cause in proof.causes] == ["unshared batches"]
    assert "every rank makes batches of its own" in proof.causes[0].fact


def test_a_difference_without_known_cause_is_told_as_such(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "        optimizer.step()", "        model[0].bias.grad *= weft_size\n        optimizer.step()"
    )
    proof = prove(
        tmp_path, text.replace("torch.manual_seed(1)", "import os\nweft_size = int(os.environ['WORLD_SIZE'])")
    )
    assert not proof.passed and proof.causes == ()
    assert proof.finding.startswith("after step 1, gradient 0.bias") and "is off by 1 of" in proof.finding


def test_a_script_that_never_weaves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="never wove a model"):
        prove(tmp_path, HEAD + LOOP)


def test_a_script_that_takes_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="took no step"):
        prove(tmp_path, SCRIPT.replace("range(2)", "range(0)"))


def test_ranks_with_parameters_of_their_own_are_not_proved_so() -> None:
    with pytest.raises(PlanError, match="parameters of their own"):
        check_provable(parse_plan("data=2 consistency=local(4)"))


SUMMED = SCRIPT.replace("mse_loss(model(x), y)", "mse_loss(model(x), y, reduction='sum')")
NORMED = SCRIPT.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()")
SUMMED_AND_NORMED = SUMMED.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()")
NOISY_SUM = SUMMED.replace("model(x)", "model(x + 0.1 * torch.randn_like(x))")
PADDED = """
import torch, weft
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

own = torch.Generator().manual_seed(0)
words = torch.randint(1, 12, (24, 6), generator=own)
lengths = torch.randint(1, 7, (24,), generator=own)
targets = torch.where(torch.arange(6) < lengths[:, None], words.roll(-1, 1), torch.tensor(-100))
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(12, 5), nn.Linear(5, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(words, targets), 8)
model, optimizer, loader = weft.weave(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("text", "names"),
    [
        (SUMMED, ["summed loss"]),
        (NORMED, ["batch norm"]),
        (SUMMED_AND_NORMED, ["batch norm", "summed loss"]),
        (NOISY_SUM, ["summed loss"]),
        (PADDED, ["tokens"]),
    ],
    ids=["sum", "batch norm", "both", "sum with noise", "tokens"],
)
@pytest.mark.filterwarnings("ignore:.*batch norm")
def test_the_cause_is_named(tmp_path: Path, text: str, names: list[str], num_ranks: int) -> None:
    proof = prove(tmp_path, text, num_ranks=num_ranks, num_steps=2)
    assert not proof.passed and [cause.name for cause in proof.causes] == names
    assert proof.finding.startswith("after step 1, ")


CURES = {
    "sum": SUMMED.replace("loader)", "loader, loss='sum')"),
    "batch norm": NORMED.replace("loader)", "loader, batch_norm='global')"),
    "tokens": PADDED.replace("optimizer, loader)", "optimizer, loader, weight=lambda b: (b[1] != -100).sum())"),
}


@pytest.mark.parametrize("text", CURES.values(), ids=CURES)
def test_the_cure_cures(tmp_path: Path, text: str) -> None:
    proof = prove(tmp_path, text, num_ranks=2, num_steps=2)
    assert proof.passed, proof.finding


def test_the_count_of_tokens_is_told(tmp_path: Path) -> None:
    (cause,) = prove(tmp_path, PADDED, num_steps=1).causes
    assert "elements that are not -100 of tensor 1 of the batch" in cause.fact
