"""The police of conftest.py, with a leak of every kind planted."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace


def test_a_clean_test_leaks_nothing(police: SimpleNamespace) -> None:
    before = police.belongings()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert police.find_leaks(before, police.belongings()) == []


def test_a_thread_that_goes_on_is_a_leak(police: SimpleNamespace) -> None:
    before, stop = police.belongings(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    leaks = police.find_leaks(before, police.belongings())
    stop.set()
    thread.join()
    assert leaks == ["thread forgotten"]


def test_a_child_process_that_goes_on_is_a_leak(police: SimpleNamespace) -> None:
    before = police.belongings()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        leaks = police.find_leaks(before, police.belongings())
    assert leaks == [f"child process {child.pid}"]


def test_a_child_that_ended_but_was_not_waited_for_is_a_leak(police: SimpleNamespace) -> None:
    before = police.belongings()
    child = subprocess.Popen(["true"])
    leaks = police.find_leaks(before, police.belongings())
    child.wait()
    assert leaks == [f"child process {child.pid}"]


def test_variables_and_folder_are_seen_and_put_back(police: SimpleNamespace, tmp_path: Path) -> None:
    os.environ["WEFT_OLD"] = "1"
    before = police.belongings()
    os.environ["WEFT_NEW"] = "1"
    os.environ["WEFT_OLD"] = "2"
    os.chdir(tmp_path)
    assert police.find_leaks(before, police.belongings()) == [
        "environment variable WEFT_NEW",
        "environment variable WEFT_OLD",
        f"current folder {tmp_path}",
    ]
    police.clean_up(before)
    assert police.belongings() == before
    assert os.environ.pop("WEFT_OLD") == "1"
