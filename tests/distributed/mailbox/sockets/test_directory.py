"""The directory of peers: whole entries, each number once."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.distributed.mailbox.sockets import AbstractDirectory, FolderDirectory, Member, StoreDirectory

MakeDirectory = Callable[[], AbstractDirectory]


@pytest.fixture(params=["folder", "store"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeDirectory:
    """Another view of the same directory at each call, as other processes have."""
    if request.param == "folder":
        return lambda: FolderDirectory(tmp_path)
    c10d: Any = torch.distributed  # its type stubs lack the stores
    store = c10d.HashStore()
    return lambda: StoreDirectory(store)


def test_many_who_join_at_once_get_different_numbers(make: MakeDirectory) -> None:
    numbers: dict[int, int] = {}
    start = threading.Barrier(8)

    def join(address: int) -> None:
        start.wait()
        numbers[address] = make().join(Member(address, f"h:{address}"))

    threads = [threading.Thread(target=join, args=(address,)) for address in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers.values()) == list(range(8))
    for address, number in numbers.items():
        assert make().read(number) == Member(address, f"h:{address}")


def test_who_leaves_is_marked_and_its_number_is_not_given_again(make: MakeDirectory) -> None:
    directory = make()
    assert directory.join(Member(3, "h:1", shared_memory="1 2 3")) == 0
    directory.leave(0)
    assert make().read(0) == Member(3, "h:1", shared_memory="1 2 3", has_left=True)
    assert directory.join(Member(3, "h:2")) == 1


def test_a_missing_entry_is_none(make: MakeDirectory) -> None:
    assert make().read(5) is None
    make().leave(5)


def test_a_folder_is_left_without_scratch_files(tmp_path: Path) -> None:
    directory = FolderDirectory(tmp_path)
    directory.join(Member(0, "h:1"))
    directory.leave(0)
    assert [path.name for path in (tmp_path / "mailbox").iterdir()] == ["member-0"]
    assert (tmp_path / "mailbox").stat().st_mode & 0o077 == 0
