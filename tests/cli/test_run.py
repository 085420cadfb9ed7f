"""`weft run`: what it makes, what it refuses, and the codes it leaves with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import DivergedError, StorageError
from weft.records.record import Repetition, RunRecord
from weft.records.record_file import new_record, read_record, write_record
from weft.records.run_folder import RunFolder, use_alone
from weft.runs import rank
from weft.training.recipe import Recipe


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the training by one that writes these repetitions and then raises, if told to."""

    def install(*repetitions: Repetition, error: BaseException | None = None) -> None:
        def run(recipe: Recipe, *, folder: RunFolder, **options: object) -> RunRecord:
            record = replace(new_record(recipe.name, recipe.to_dict(), recipe.fixed_hash), repetitions=repetitions)
            write_record(folder.path, record)
            if error is not None:
                raise error
            return record

        monkeypatch.setattr(rank, "run_recipe", run)

    return install


def test_accepted_run_ends_with_a_table_and_the_folder(weft: Any, tmp_path: Path) -> None:
    outcome = weft("run", "digits_mlp")
    assert outcome.code == 0, outcome
    (folder,) = (tmp_path / "runs").iterdir()
    assert outcome.out.startswith("digits_mlp\n  done, all samples used: seed 0\n\nmeasured\n")
    assert "  PASS  test/accuracy >= 0.97" in outcome.out
    assert outcome.out.endswith(f"run folder: runs/{folder.name}\n")
    assert "seed 0   50%  loss" in outcome.err and "seed 0  epoch 1  validation/loss" in outcome.err


def test_run_that_is_not_accepted_is_1(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft("run", *tiny, "--out", "here")
    assert outcome.code == 1
    assert "not accepted\n  FAIL  test/accuracy >= 0.97" in outcome.out
    assert outcome.out.endswith("run folder: here\n")


def test_repetitions_take_consecutive_seeds(weft: Any, tiny: tuple[str, ...]) -> None:
    weft("run", *tiny, "--repeat", "3", "--seed", "5", "--out", "here")
    assert [r.seed for r in read_record(Path("here")).repetitions] == [5, 6, 7]


def test_json_is_one_document_and_quiet_is_quiet(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft("run", *tiny, "--json", "--quiet", "--out", "here")
    assert (outcome.code, outcome.err) == (1, "")
    document = outcome.json
    assert (document["path"], document["accepted"]) == ("here", False)
    assert document["record"]["repetitions"][0]["status"] == "done"


def test_progress_does_not_disturb_json(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft("run", *tiny, "--json", "--out", "here")
    assert "seed 0" in outcome.err and outcome.json["path"] == "here"


def test_recipe_of_the_users_own(weft: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from weft.recipes import digits_mlp\n"
        "def small():\n"
        "    return digits_mlp().with_setting('epochs', '0.1').with_setting('schedule', 'constant')\n"
    )
    assert weft("run", "mine.py:small", "--out", "here", "--quiet").code == 1
    assert weft("run", "mine.py:smal").err == "error: no such function in mine.py (smal); did you mean 'small'?\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("digits_mlp", "--device", "cuda"), "no such device (device: cuda, here: cpu); choose one, or auto"),
        ((), "no recipe was given; name one that `weft list` shows, or use --resume"),
        (("digit_mlp",), "unknown recipe (digit_mlp); did you mean 'digits_mlp'?"),
        (("no.py:f",), "no such file (no.py)"),
        (("digits_mlp", "--set", "epoch=1"), "unknown key (epoch); did you mean 'epochs'?"),
        (("digits_mlp", "--set", "optimizer=adm"), "unknown optimizer (adm); did you mean 'adam'?"),
        (("digits_mlp", "--set", "optimizer.rl=1"), "(rl); did you mean 'lr'?"),
        (("digits_mlp", "--set", "epochs=many"), "value of the wrong type (epochs: 'many', wanted: float)"),
        (("digits_mlp", "--set", "batch_size=1.5"), "value of the wrong type (batch_size: 1.5, wanted: int)"),
        (("digits_mlp", "--set", "batch_size=-3"), "value must be positive (batch_size: -3)"),
        (("digits_mlp", "--set", "epochs"), "setting is not of the form key=value (epochs)"),
        (("digits_mlp", "--set", "=3"), "setting is not of the form key=value (=3)"),
    ],
)
def test_bad_input_is_2_and_leaves_no_folder(weft: Any, tmp_path: Path, line: tuple[str, ...], text: str) -> None:
    outcome = weft("run", *line)
    assert (outcome.code, outcome.out) == (2, "")
    assert text in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_folder_that_holds_a_run_is_refused(weft: Any, finished_run: Path) -> None:
    outcome = weft("run", "digits_mlp", "--out", finished_run)
    assert outcome.code == 2 and f"continue with --resume {finished_run}" in outcome.err


def test_run_that_failed_shows_its_record_and_is_3(weft: Any, fake_training: Callable[..., None]) -> None:
    error = DivergedError("loss is not finite (step: 7); lower the learning rate")
    fake_training(Repetition(0, "failed", "loss is not finite (step: 7)", ""), error=error)
    outcome = weft("run", "digits_mlp", "--out", "here")
    assert outcome.code == 3
    assert "failed, loss is not finite (step: 7): seed 0" in outcome.out
    assert outcome.err == f"error: {error}\n"


def test_run_that_failed_still_prints_one_document(weft: Any, fake_training: Callable[..., None]) -> None:
    fake_training(Repetition(0, "failed", "diverged", ""), error=DivergedError("diverged"))
    outcome = weft("run", "digits_mlp", "--json")
    assert (outcome.code, outcome.json["record"]["repetitions"][0]["status"]) == (3, "failed")


def test_disk_that_was_full_before_the_first_record_is_3(weft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise StorageError("file could not be written (here/record.json: No space left on device)")

    monkeypatch.setattr(rank, "run_recipe", run)
    outcome = weft("run", "digits_mlp", "--out", "here")
    assert (outcome.code, outcome.out) == (3, "")
    assert "No space left on device" in outcome.err


def test_ctrl_c_names_the_command_that_goes_on(weft: Any, fake_training: Callable[..., None]) -> None:
    fake_training(Repetition(0, "interrupted", "interrupted", ""), error=KeyboardInterrupt())
    outcome = weft("run", "digits_mlp", "--out", "my run")
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err == "interrupted; go on with: weft run --resume 'my run'\n"


def test_resumed_run_goes_on_to_the_end(weft: Any, tiny: tuple[str, ...], fake_training: Callable[..., None]) -> None:
    fake_training(Repetition(4, "interrupted", "interrupted", ""), error=KeyboardInterrupt())
    weft("run", *tiny, "--out", "here")
    outcome = weft("run", "digits_mlp", "--resume", "here")
    assert outcome.code == 1 and "done, all samples used: seed 4" in outcome.out
    assert "seed 4" in outcome.err


def test_a_run_that_is_under_way_is_not_resumed_beside(
    weft: Any, tiny: tuple[str, ...], fake_training: Callable[..., None], tmp_path: Path
) -> None:
    fake_training(Repetition(4, "interrupted", "interrupted", ""), error=KeyboardInterrupt())
    weft("run", *tiny, "--out", "here")
    with use_alone(RunFolder(tmp_path / "here")):
        for line in (("--resume", "here"), ("--resume", "here", "--workers", "2")):
            outcome = weft("run", *line)
            assert (outcome.code, outcome.out) == (
                2,
                "",
            ) and "run is under way in another process (here)" in outcome.err


def test_a_run_says_what_it_does_beside_its_steps(weft: Any, tiny: tuple[str, ...]) -> None:
    """Once seconds went by in silence."""
    alone, two = weft("run", *tiny), weft("run", *tiny, "--workers", "2", "--quiet")
    assert alone.err.startswith("loading data\nseed 0  started") and alone.err.endswith("measuring one step\n")
    assert two.err == ""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("--seed", "0"), "a resumed run keeps its settings (--seed); leave them out"),
        (("--set", "epochs=2", "--repeat", "1", "--out", "x"), "keeps its settings (--set, --repeat, --out)"),
        (("pydoc_gpt",), "run is of another recipe"),
        ((), "run has ended, nothing is left to resume"),
    ],
)
def test_resume_that_would_change_the_run_is_refused(
    weft: Any, finished_run: Path, line: tuple[str, ...], text: str
) -> None:
    outcome = weft("run", *line, "--resume", finished_run)
    assert (outcome.code, outcome.out) == (2, "") and text in outcome.err


def test_resume_of_nothing_is_refused(weft: Any, tmp_path: Path) -> None:
    assert "no such run folder" in weft("run", "--resume", tmp_path / "absent").err
    assert "not a run folder" in weft("run", "--resume", tmp_path).err
