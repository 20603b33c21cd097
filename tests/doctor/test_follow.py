import os
from pathlib import Path

from leadline.doctor import follow
from leadline.doctor.follow import GrowingFile, GrowingInput, grows_by_lines


def test_only_whole_lines_that_are_new_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntw")
    log = GrowingFile(path)
    assert list(log.pieces()) == ["one\n"]
    assert list(log.pieces()) == []
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert list(log.pieces()) == ["two\nthree\n"]


def test_a_file_that_is_not_there_yet_has_no_lines_and_one_that_got_shorter_is_read_from_its_start(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    log = GrowingFile(path)
    assert list(log.pieces()) == []
    path.write_text("a long first line\n")
    assert list(log.pieces()) == ["a long first line\n"]
    path.write_text("new\n")
    assert list(log.pieces()) == ["new\n"]


def test_a_line_longer_than_a_piece_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (follow.PIECE + 10) + b"\nnext\n")
    text = "".join(GrowingFile(path).pieces())
    assert text == "x" * 10 + "\nnext\n"


def test_a_pipe_gives_its_last_line_at_its_end() -> None:
    out, into = os.pipe()
    log = GrowingInput(out)
    assert list(log.pieces()) == []
    os.write(into, b"one\ntwo")
    assert list(log.pieces()) == ["one\n"]
    os.close(into)
    assert list(log.pieces()) == ["two"]
    assert log.ended
    os.close(out)


def test_documents_and_binary_files_do_not_grow_by_lines(tmp_path: Path) -> None:
    cases = {
        "metrics.jsonl": (b'{"step": 1}\n{"step": 2}\n', True),
        "train.log": (b"{'loss': 0.0}\n 10%|#  | 1/10\n", True),
        "console": (b"step:1 - actor/loss:0.1\n", True),
        "rows.csv": (b"step,loss\n1,0.1\n", True),
        "bracket.log": (b"[2026-11-29 12:00:00] step 1\n", True),
        "trainer_state.json": (b'{\n  "log_history": [\n', False),
        "short.json": (b'{"log_history": []}', False),
        "list.json": (b"[1, 2]\n", False),
        "rows.parquet": (b"PAR1....", False),
        "events.out.tfevents.1": (b"\x18\0\0\0\0\0\0\0", False),
        "metrics.jsonl.gz": (b"\x1f\x8b\x08", False),
    }
    for name, (content, expected) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert grows_by_lines(path) is expected, name
