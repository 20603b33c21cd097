"""Whatever stands in a file, reading it ends soon, in bounded memory, with a run or an error in words."""

import gzip
import os
import random
import resource
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from leadline.doctor.readers import read_runs
from leadline.errors import LogError

LOGS = Path(__file__).parents[2] / "golden" / "logs"
SECONDS = 6.0
"""CPU seconds that one hostile file may take, on a slow machine."""


def survives(path: Path) -> None:
    began = time.process_time()
    with suppress(LogError):
        read_runs([path])
    assert time.process_time() - began < SECONDS


HOSTILE = {
    "deep list": b"[" * 2_000_000,
    "deep object": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "deep row": (b'{"step":1,"loss":' + b"[" * 3000 + b"]" * 3000 + b"}\n") * 20,
    "deep python": b"{'loss': 1, " * 100_000,
    "many openings": b"{\n'a': {" * 50_000,
    "one word": b"a" * 20_000_000,
    "digits": b"0" * 10_000_000,
    "many pairs in a line": b"step:1 - " + b"a/b:1 - " * 300_000,
    "many keys": b'{"step":1,' + b",".join(b'"k%d":%d' % (i, i) for i in range(100_000)) + b'}\n{"step":2,"loss":1}',
    "many columns": b",".join(b"c%d" % i for i in range(50_000)) + b"\n" + b",".join([b"1"] * 50_000),
    "nan everywhere": b'{"step":NaN,"loss":NaN,"reward":NaN,"grad_norm":Infinity}\n' * 500,
    "huge steps": b'{"step":1e308,"loss":1,"reward":2}\n{"step":-1e308,"loss":2,"reward":2}\n',
    "yaml anchors": b"a: &a [x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(20)),
    "yaml merges": b"a: &a {x: 1}\n"
    + b"".join(b"%c: &%c {<<: [*%c, *%c]}\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(24)),
    "events": b"\x18" + b"\0" * 7 + b"abcd\x09" + bytes(range(256)) * 4,
    "parquet": b"PAR1" + bytes(range(256)) * 4,
    "database": b"SQLite format 3\0" + bytes(range(256)) * 40,
    "wandb": b":W&B\xbe\xe1\0" + bytes(range(256)) * 400,
    "pickle": b"\x80\x04" + bytes(range(256)) * 10,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_survived(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(HOSTILE[name])
    survives(path)


def test_a_packed_file_is_not_unpacked_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b'{"step": 1, "loss": 1, "reward": 1}\n' * 2_200_000, 6))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (run,) = read_runs([path])
    assert any("the rest was not read" in note for note in run.notes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10


def test_an_archive_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"0" * 50_000_000)
    survives(path)


def test_damaged_logs_are_survived(tmp_path: Path) -> None:
    rng = random.Random(5)
    logs = [path.read_bytes() for path in sorted(LOGS.iterdir()) if path.is_file()]
    path = tmp_path / "x"
    for turn in range(300):
        data = bytearray(rng.choice(logs))
        if turn % 3 == 0:
            del data[rng.randrange(len(data)) :]
        elif turn % 3 == 1:
            for _ in range(rng.randrange(1, 100)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            place = rng.randrange(len(data))
            data[place:place] = rng.randbytes(rng.randrange(500))
        path.write_bytes(data)
        survives(path)


def test_nothing_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret.jsonl"
    run.mkdir()
    secret.write_text('{"step": 1, "loss": 1.0, "reward": 2.0}\n')
    os.symlink(secret, run / "metrics.jsonl")
    os.symlink(tmp_path, run / "logs")
    with pytest.raises(LogError):
        read_runs([run])
