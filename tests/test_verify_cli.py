"""The verifiers' own command line: what it says of bad lines, files and options."""

import json

import pytest

from sage_jax.verify.__main__ import main

GOOD = {"id": "a", "gold": "4", "prediction": "<answer>4</answer>"}
BAD = [
    ("{broken\n", "not JSON"),
    ("[1]\n", "a row must be an object, got list"),
    ({"gold": "4", "prediction": "4"}, "id must be text or an integer, got None"),
    (GOOD, "id 'a' was used on line 1; ids must be unique"),
    ({"id": "b", "prediction": "4"}, "gold must be text, got nothing"),
]


def write(path, rows):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return path


def judge(source, target, *more):
    return main(["math", f"--input={source}", f"--output={target}", "--workers=1", *more])


def test_bad_lines_are_named_with_file_and_line_and_the_rest_is_judged(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [GOOD, "\n", *(row for row, _ in BAD)])
    target = tmp_path / "new" / "out.jsonl"
    assert judge(source, target) == 1
    (row,) = map(json.loads, target.read_text().splitlines())
    assert (row["id"], row["verdict"]) == ("a", "correct")
    out = capsys.readouterr()
    *told, closing = out.err.splitlines()
    assert not out.out and closing == f"judged 1 rows into {target}; bad lines left out: 5"
    for line, (number, (_, said)) in zip(told, enumerate(BAD, 3), strict=True):
        assert line.startswith(f"{source}: line {number}: {said}")


def test_a_file_without_bad_lines_ends_with_where_the_verdicts_are(tmp_path, capsys):
    source, target = write(tmp_path / "in.jsonl", [GOOD]), tmp_path / "out.jsonl"
    assert judge(source, target) == 0
    assert capsys.readouterr().err == f"judged 1 rows into {target}\n"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("absent", "out", "--input={0}/absent: No such file or directory; give a file"),
        ("folder", "out", "--input={0}/folder: Is a directory; give a file"),
        ("unreadable", "out", "--input={0}/unreadable: Input/output error; give a file"),
        ("in", "folder", "--output={0}/folder: Is a directory; choose another file"),
        ("in", "in/out", "--output={0}/in/out: File exists; choose another file"),
        ("in", "in", "--output={0}/in: is the input; choose another file"),
    ],
)
def test_files_that_cannot_be_used_are_named_and_nothing_is_lost(
    tmp_path, capsys, source, target, said
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "unreadable").symlink_to("/proc/self/mem")
    write(tmp_path / "in", [GOOD])
    write(tmp_path / "out", ["what was judged before"])
    with pytest.raises(SystemExit) as stop:
        judge(tmp_path / source, tmp_path / target)
    assert stop.value.code == 2 and said.format(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "what was judged before"
    assert json.loads((tmp_path / "in").read_text()) == GOOD


def test_help_says_what_every_option_means(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    for part in (
        "math: id, gold, prediction; code: id, solution, tests",
        "--workers N rows judged at one time (default 2)",
        "--policy eval|reward where the answer may stand: eval (default)",
        "weakest isolation accepted for code (default B",
        "Exit codes: 0 all rows judged",
    ):
        assert part in text


def test_a_worker_count_below_one_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        judge(write(tmp_path / "in", [GOOD]), tmp_path / "out", "--workers=0")
    assert "--workers=0: give at least 1" in capsys.readouterr().err


def test_a_full_disk_is_named_and_is_no_bad_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        judge(write(tmp_path / "in", [GOOD]), "/dev/full")
    assert stop.value.code == 2
    assert "--output=/dev/full: No space left on device" in capsys.readouterr().err
