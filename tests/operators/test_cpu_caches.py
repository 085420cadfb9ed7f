"""The caches that Linux tells of."""

from pathlib import Path

from weft.operators.cpu_caches import Cache, read_caches


def plant(cpu: Path, index: int, **facts: str) -> None:
    folder = cpu / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in facts.items():
        (folder / name).write_text(f"{text}\n")


def test_data_caches_nearest_first(tmp_path: Path) -> None:
    plant(tmp_path, 0, level="3", type="Unified", size="32M", shared_cpu_list="0-3,8-11")
    plant(tmp_path, 1, level="1", type="Instruction", size="64K", shared_cpu_list="0")
    plant(tmp_path, 2, level="1", type="Data", size="32K", shared_cpu_list="0")
    plant(tmp_path, 3, level="2", type="Unified", size="512K", shared_cpu_list="0,8")
    assert read_caches(tmp_path) == (Cache(1, 2**15, 1), Cache(2, 2**19, 2), Cache(3, 2**25, 8))


def test_unreadable_caches_are_left_out(tmp_path: Path) -> None:
    plant(tmp_path, 0, level="1", type="Data", size="unknown", shared_cpu_list="0")
    plant(tmp_path, 1, level="2", type="Data", size="1M", shared_cpu_list="?")
    assert read_caches(tmp_path) == (Cache(2, 2**20, 1),)
    assert read_caches(tmp_path / "absent") == ()


def test_threads_share_a_cache_only_as_far_as_processors_do() -> None:
    assert (Cache(1, 100, 1).share_of(2), Cache(1, 100, 1).total_of(2)) == (100, 200)
    assert (Cache(3, 100, 8).share_of(2), Cache(3, 100, 8).total_of(2)) == (50, 100)
