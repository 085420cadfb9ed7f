"""The run's secret: where it is found, and what is no secret."""

import stat
from pathlib import Path

import pytest

from weft.errors import UsageError
from weft.secret import SECRET_VARIABLE, find_secret, make_secret, read_secret, write_secret


def test_it_is_found_in_the_folder_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    secret = make_secret()
    path = write_secret(tmp_path, secret)
    assert find_secret(tmp_path, {}) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_secret(tmp_path, make_secret())


def test_the_environment_comes_first(tmp_path: Path) -> None:
    write_secret(tmp_path, make_secret())
    assert find_secret(tmp_path, {SECRET_VARIABLE: "ab" * 32}) == b"\xab" * 32


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    write_secret(tmp_path, make_secret()).chmod(0o640)
    with pytest.raises(UsageError, match="can be read by others"):
        find_secret(tmp_path, {})


@pytest.mark.parametrize(("text", "fault"), [("xyz", "not hexadecimal"), ("ab" * 15, "too short"), ("", "no secret")])
def test_what_is_no_secret_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        find_secret(tmp_path, {SECRET_VARIABLE: text})


def test_secrets_differ() -> None:
    assert len({make_secret() for _ in range(10)}) == 10


def test_a_secret_is_read_from_the_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.touch(0o600)
    file.write_text(f"{'ab' * 32}\n")
    assert read_secret(file) == bytes.fromhex("ab" * 32)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        read_secret(file)
    with pytest.raises(UsageError, match="there is no file with a secret"):
        read_secret(tmp_path / "absent")
