"""`weft launch`: a script of one's own on several ranks, its errors as Python shows them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Outcome, run_weft
from weft.cli.launch import split_launch

WEFT = (sys.executable, "-m", "weft")
JOIN = "from weft.distributed.place import find_launch, open_group\nopen_group(find_launch()).close()\n"
HOSTS = ("--rendezvous", "127.0.0.1:29500", "--host-rank", "0", "--num-hosts", "2")
TELL = (
    f"import os, sys, pathlib\n{JOIN}"
    "rank = os.environ['RANK']\n"
    "names = ('WORLD_SIZE', 'WEFT_SIZE', 'WEFT_PLAN')\n"
    "pathlib.Path(f'rank-{rank}').write_text(f'{sys.argv} {[os.environ.get(n) for n in names]}')\n"
    "print('this is', rank)\n"
)


@pytest.fixture
def launch(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`launch(text, "--workers", 2, ..., "script.py", ...)`, with what the ranks print too."""
    monkeypatch.chdir(tmp_path)

    def start(text: str, *words: str) -> Outcome:
        Path("mine.py").write_text(text)
        return run_weft(capfd, "launch", *words)

    return start


@pytest.mark.parametrize(
    "words",
    [
        ("mine.py", "--workers", "1", "--lr", "0.1", "--debug", "--help"),
        ("--workers", "2", "mine.py", "--", "-m", "x"),
        ("--workers=2", "--", "mine.py", "--plan"),
        ("-m", "mine", "--output", "all", "--"),
    ],
)
def test_everything_after_the_script_is_the_scripts(launch: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Once `--workers 1` after the script started one rank."""
    outcome = launch(TELL, *words)
    assert (outcome.code, outcome.out, outcome.err) == (0, "this is 0\n", "")
    position = words.index("mine" if words[0] == "-m" else "mine.py")
    name = str(tmp_path / "mine.py") if words[0] == "-m" else "mine.py"
    argv = [name, *words[position + 1 :]]
    for rank in range(2):
        assert Path(f"rank-{rank}").read_text() == f"{argv} ['2', '2', None]"


def test_a_plan_says_how_many_processes_there_are(launch: Any) -> None:
    """Servers of their own come after the ranks that scripts count."""
    plan = "data=2 consistency=async(lr=share) topology=server(shards=1,place=own)"
    outcome = launch(TELL, "--plan", "consistency=async topology=server(1,place=own)", "--output", "all", "mine.py")
    assert (outcome.code, outcome.err) == (0, "")
    assert sorted(outcome.out.splitlines()) == [f"[rank {rank}] this is {rank}" for rank in range(3)]
    assert Path("rank-2").read_text() == f"['mine.py'] ['2', '3', '{plan}']"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("absent.py",), "no such script (absent.py)"),
        ((), "no script was given; name a Python file"),
        (("--plan", "data=2 consistency=quick", "mine.py"), "unknown value in a plan (consistency: quick)"),
        (("--plan", "data=2", "--workers", "3", "mine.py"), "plan and workers differ (plan: 2, workers: 3)"),
        (("--lr", "0.1", "mine.py"), "No such option: --lr"),
        (("--output", "some", "mine.py"), "'some' is not"),
        (("--host-rank", "1", "mine.py"), "--host-rank is for several hosts; give --rendezvous ADDRESS:PORT too"),
        (("--rendezvous", "10.0.0.1:29500", "mine.py"), "give --host-rank and --num-hosts too"),
        ((*HOSTS, "--out", "run", "mine.py"), "a run on several hosts is not recorded"),
        ((*HOSTS, "--plan", "data=2 consistency=async topology=server", "mine.py"), "give --secret-file, or set"),
        ((*HOSTS, "--secret-file", "absent", "mine.py"), "there is no file with a secret (absent)"),
        ((*HOSTS, "--workers", "3", "mine.py"), "hosts would have different numbers of ranks (3 on 2 hosts)"),
    ],
)
def test_wrong_use_is_2_and_starts_nothing(launch: Any, words: tuple[str, ...], text: str) -> None:
    outcome = launch("print('began')\n", *words)
    assert (outcome.code, outcome.out) == (2, "") and text in outcome.err


def test_an_exception_of_any_rank_is_shown_as_python_shows_it(launch: Any, tmp_path: Path) -> None:
    script = (
        f"import os\n{JOIN}"
        "def check(rank):\n"
        "    try:\n"
        "        {}[rank]\n"
        "    except KeyError as error:\n"
        "        raise ValueError('seven is not six') from error\n"
        "if os.environ['RANK'] == '1':\n"
        "    check(1)\n"
    )
    outcome = launch(script, "--logs", "logs", "mine.py")
    file = tmp_path / "mine.py"
    assert outcome.code == 3
    assert outcome.err.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{file}", line 6, in check',
        "    {}[rank]",
        "    ~~^^^^^^",
        "KeyError: 1",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        f'  File "{file}", line 10, in <module>',
        "    check(1)",
        f'  File "{file}", line 8, in check',
        "    raise ValueError('seven is not six') from error",
        "ValueError: seven is not six",
        "error: rank 1 of 2: ValueError: seven is not six",
    ]
    assert Path("logs/rank-1.log").read_text() == outcome.err.rpartition("error:")[0]


def test_debug_adds_the_frames_of_weft(launch: Any) -> None:
    script = "import weft\nweft.parse_plan('dta=2')\n"
    shown, whole = launch(script, "mine.py"), launch(script, "--debug", "mine.py")
    assert (shown.code, whole.code) == (2, 2)
    assert "line 2, in <module>\n    weft.parse_plan('dta=2')\nweft.errors.PlanError: unknown word" in shown.err
    assert "parsing.py" not in shown.err and "parsing.py" in whole.err and "rank_program.py" in whole.err
    assert shown.err.splitlines()[-1] == whole.err.splitlines()[-1] or "rank 1" in shown.err + whole.err


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("import sys; sys.exit(7)", 7, "rank 1 of 2: ended with exit code 7"),
        ("import sys; sys.exit('no data here')", 1, "ended with exit code 1; the end of its log:\n  no data here"),
        ("x = = 1", 3, "rank 1 of 2: SyntaxError: invalid syntax"),
        ("os.kill(os.getpid(), 11)", 3, "rank 1 of 2: ended by SIGSEGV"),
    ],
)
def test_other_ways_to_end_are_told_too(launch: Any, line: str, code: int, text: str) -> None:
    indented = f"if os.environ['RANK'] == '1': exec({line!r}, globals())\n"
    outcome = launch(f"import os\n{JOIN}{indented}", "mine.py")
    assert outcome.code == code and text in outcome.err


def test_a_script_that_leaves_with_0_is_done(launch: Any) -> None:
    assert launch(f"import sys\n{JOIN}sys.exit(0)\n", "mine.py").code == 0


def test_a_launch_that_shares_nothing_fails(launch: Any) -> None:
    outcome = launch("print('trained')\n", "mine.py")
    assert (outcome.code, outcome.out) == (2, "trained\n")
    error = r"error: rank \d of 2: script never joined the other ranks, .*; call weft.weave .*?"
    log_of_rank_1 = r"; the end of its log:\n  trained"  # rank 0 has the terminal; either rank may be the first to end
    assert re.fullmatch(f"{error}({log_of_rank_1})?\n", outcome.err)


@pytest.mark.slow
def test_torch_distributed_joins_by_the_variables(launch: Any) -> None:
    """Also if it has parted before the end; two groups, one after the other, over the same port."""
    script = (
        "import torch, torch.distributed as dist\n"
        "for _ in range(2):\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    dist.destroy_process_group()\n"
        "print(total.item(), dist.is_torchelastic_launched())\n"
    )
    outcome = launch(script, "mine.py")
    assert (outcome.code, outcome.out) == (0, "2.0 True\n"), outcome.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGHUP, -1)])
def test_a_signal_ends_the_launch_and_leaves_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    """Once SIGTERM left a folder with the run's secret in the temporary folder."""
    (tmp_path / "mine.py").write_text(f"import time\n{JOIN}print('ready', flush=True)\ntime.sleep(100)\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [*WEFT, "launch", "mine.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert list(temporary.glob("weft-ranks-*/secret"))
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, "interrupted\n" if number == signal.SIGINT else "")
    assert not list(temporary.glob("weft-ranks-*"))


def test_the_line_is_cut_at_the_script() -> None:
    options = ["--workers", "-m"]
    assert split_launch(["-mpackage.train", "--", "x"], options) == (["-mpackage.train"], ["--", "x"])
    assert split_launch(["--help"], options) == (["--help"], [])
    assert split_launch(["--workers"], options) == (["--workers"], [])
