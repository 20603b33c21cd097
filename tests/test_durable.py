from pathlib import Path

import pytest

from leadline.durable import leftovers, partial_file, remove, write_whole


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_whole(target, b"old")
    with pytest.raises(ZeroDivisionError), partial_file(target) as partial:
        partial.write_bytes(b"ne")
        raise ZeroDivisionError
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_nothing_is_seen_under_the_name_before_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with partial_file(target) as partial:
        partial.mkdir()
        (partial / "a").write_bytes(b"1")
        assert not target.exists()
        assert leftovers(tmp_path) == [partial]
    assert (target / "a").read_bytes() == b"1"
    assert leftovers(tmp_path) == []


def test_a_directory_loses_its_name_before_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(folder)
    assert not folder.exists()
    assert len(leftovers(tmp_path)) == 1


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove(tmp_path / "nothing")
