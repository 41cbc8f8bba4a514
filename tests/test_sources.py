"""Task sources: every accepted form loads, every fault is listed with its place."""

import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from sage_jax.overrides import ListParser
from sage_jax.tasks import sources
from sage_jax.tasks.sources import SourceError, load, load_apart

SHARED = Path(__file__).parents[1].parent / "shared"


def row(id, **changes):
    return {"id": id, "domain": "math", "question": f"What is {id}?", "answer": "1", **changes}


def write(path, *rows):
    lines = (line if isinstance(line, str) else json.dumps(line) for line in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def problems(*specs):
    with pytest.raises(SourceError) as caught:
        load(specs)
    return caught.value.problems


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="../shared absent")
def test_all_data_files_load_together_as_they_are():
    paths = sorted((SHARED / "data").glob("*.jsonl"))
    tasks = load(map(str, paths))
    assert len(tasks) == sum(len(path.read_bytes().splitlines()) for path in paths)
    assert {task.domain for task in tasks} == {"math", "code"}
    mbpp = load([f"{SHARED}/data/mbpp.jsonl#train"])
    assert sorted(int(task.id.split("/")[1]) for task in mbpp) == [*range(601, 975)]


def test_files_keep_their_order_and_blank_lines_do_not_matter(tmp_path):
    one = write(tmp_path / "one.jsonl", row("b"), "", row("a"))
    two = write(tmp_path / "two.jsonl", row("c"))
    assert [task.id for task in load([two, one])] == ["c", "b", "a"]


def test_every_bad_line_of_every_file_is_listed_at_once(tmp_path):
    one = write(tmp_path / "one.jsonl", row("a"), "{", "", row("b", answer=None), "[]")
    two = write(tmp_path / "two.jsonl", row("c", domain="maths", question=""), row("a"))
    found = problems(one, str(tmp_path / "none.jsonl"), two)
    assert [f.partition(": ")[0] for f in found] == [
        f"{one}:2",
        f"{one}:4",
        f"{one}:5",
        str(tmp_path / "none.jsonl"),
        f"{two}:1",
        f"{two}:1",
        f"{two}:2",
    ]
    assert "mend or delete the line" in found[0]
    assert "field 'answer' is missing: give" in found[1]
    assert "no such file" in found[3]
    assert "'maths': use 'math' or 'code'" in found[5]
    assert f"field 'id' is 'a', which {one}:1 has" in found[6]


def test_groups_are_loaded_apart_and_the_problems_of_all_are_listed(tmp_path):
    one = write(tmp_path / "one.jsonl", row("a"))
    two = write(tmp_path / "two.jsonl", row("a"), "{")
    assert [[task.id for task in tasks] for tasks in load_apart([[one], [one]])] == [["a"], ["a"]]
    with pytest.raises(SourceError) as caught:
        load_apart([["none.jsonl", two], [one], ["gone.jsonl"], [two]])
    places = [text.partition(": ")[0] for text in caught.value.problems]
    assert places == ["none.jsonl", f"{two}:2", "gone.jsonl"]


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_what_json_does_not_know_is_a_bad_line(tmp_path, name):
    path = write(tmp_path / "a.jsonl", json.dumps(row("a", level="?")).replace('"?"', name))
    assert f"{name} is not JSON" in problems(path)[0]


def test_long_lists_are_cut_in_print_but_not_in_the_error(tmp_path):
    path = write(tmp_path / "bad.jsonl", *["{"] * 50)
    with pytest.raises(SourceError) as caught:
        load([path])
    assert len(caught.value.problems) >= 50
    lines = str(caught.value).splitlines()
    assert (
        len(lines) == 22 and lines[-1].strip() == f"... and {len(caught.value.problems) - 20} more"
    )


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(row("a")).encode() + b'\n{"id": "\xff"}\n' + b"[" * 100_000)
    assert [f.partition(": ")[0] for f in problems(str(path))] == [f"{path}:2", f"{path}:3"]


def test_an_empty_file_and_an_absent_split_are_errors(tmp_path):
    path = write(tmp_path / "some.jsonl", row("a", split="train"), row("b", split="test"))
    assert [task.id for task in load([path + "#test"])] == ["b"]
    assert "the file has test, train" in problems(path + "#valid")[0]
    assert "holds no tasks" in problems(write(tmp_path / "empty.jsonl"))[0]


def test_packaged_files_load_by_name(tmp_path, monkeypatch):
    (tmp_path / "assets" / "seeds").mkdir(parents=True)
    write(tmp_path / "assets" / "seeds" / "train.jsonl", row("a"), "{")
    monkeypatch.setattr(sources.resources, "files", lambda package: tmp_path)
    assert problems("asset:seeds/train.jsonl")[0].startswith("asset:seeds/train.jsonl:2: no JSON")
    assert "no such packaged file" in problems("asset:seeds/none.jsonl")[0]


def test_foreign_columns_are_mapped_and_checked_at_once(tmp_path):
    path = write(
        tmp_path / "foreign.jsonl",
        {"problem": "Add 1 and 2.", "worked": "1 + 2\n#### 3", "notes": "the key is 3"},
        {"problem": "Halve 1.", "worked": "so \\boxed{\\frac{1}{2}} it is"},
        {"problem": "Double 2.", "worked": " 4 "},
    )
    tasks = load([f"{path}?domain=math&question=problem&answer=worked"])
    assert [task.id for task in tasks] == [f"foreign.jsonl/{i}" for i in range(3)]
    golds = [task.job("1", "").payload["gold"] for task in tasks]
    assert golds == ["3", r"\frac{1}{2}", "4"]
    assert "notes" not in tasks[0].to_json()
    (found,) = problems(f"{path}?domain=math&question=problm&answer=worked")
    assert "no column problm; it has notes, problem, worked" in found
    assert "unknown field quetion" in problems(f"{path}?quetion=problem")[0]
    assert "write ?field=column" in problems(f"{path}?question")[0]


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyQa(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            text = tfds.features.Text()
            features = {"question": text, "answer": text, "level": np.int64}
            features["subject"] = tfds.features.Sequence(tfds.features.Text())
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(3):
                yield (
                    i,
                    {
                        "question": f"What is {i} + 1?",
                        "answer": f"#### {i + 1}",
                        "level": i,
                        "subject": ["a", "ü"],
                    },
                )

    folder = str(tmp_path_factory.mktemp("tfds"))
    TinyQa(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_tfds_data_sets_load_through_their_data_source(tfds_dir):
    tasks = load([f"tfds:tiny_qa/train?domain=math&data_dir={tfds_dir}"])
    assert sorted(task.question for task in tasks) == [f"What is {i} + 1?" for i in range(3)]
    for task in tasks:
        gold = task.job("1", "").payload["gold"]
        assert task.question == f"What is {int(gold) - 1} + 1?"
        assert task.provenance["level"] == int(gold) - 1
        assert task.provenance["subject"] == ["a", "ü"]
        assert task.provenance["source"] == "tfds:tiny_qa/train"
        json.dumps(task.to_json())


def test_tfds_faults_name_the_source(tfds_dir):
    assert "Unknown split 'tset'" in problems(f"tfds:tiny_qa/tset?data_dir={tfds_dir}")[0]
    assert "not found" in problems(f"tfds:no_such_set/train?data_dir={tfds_dir}")[0]
    assert "tfds:NAME/SPLIT" in problems("tfds:tiny_qa")[0]
    found = problems(f"tfds:tiny_qa/train?data_dir={tfds_dir}")
    assert len(found) == 3 and all("field 'domain' is None" in problem for problem in found)


def test_hugging_face_folders_without_the_package_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in problems(f"hf:{tmp_path}")[0]


def test_hugging_face_folders_load_by_split(monkeypatch, tmp_path):
    package = types.ModuleType("datasets")
    package.DatasetDict = type("DatasetDict", (dict,), {})
    rows = [{"id": 7, "question": "What is 1 + 1?", "answer": "2"}]

    def load_from_disk(folder):
        if not Path(folder).is_dir():
            raise FileNotFoundError(folder)
        return package.DatasetDict(train=rows, test=[])

    package.load_from_disk = load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", package)
    (task,) = load([f"hf:{tmp_path}#train?domain=math"])
    assert (task.id, task.question) == ("7", "What is 1 + 1?")
    assert "choose a split with #: test, train" in problems(f"hf:{tmp_path}")[0]
    assert "no data set there" in problems(f"hf:{tmp_path}/none#train")[0]


def test_every_source_on_the_page_about_seeds_is_read_as_it_says():
    page = (Path(__file__).parents[1] / "docs" / "seeds.md").read_text()
    table = re.findall(r"^\| `([^`]+[/:][^`]+)` \|", page, re.M)
    options = re.findall(r"^    --config\.(?:tasks\.seeds|valid\.path)=(.+)$", page, re.M)
    examples = {
        text: sources._parse(text)
        for text in [*table, *(item for text in options for item in ListParser().parse(text))]
    }
    assert len(table) >= 7 and len(options) >= 5
    for text, spec in examples.items():
        assert spec.kind == (text.split(":")[0] if re.match(r"\w+:", text) else "jsonl"), text
        assert not set(spec.location) & set("?#&="), text
    assert {spec.kind for spec in examples.values()} == {"jsonl", "asset", "tfds", "hf"}
    sliced = examples["tfds:gsm8k/train[:500]?domain=math&data_dir=/data/tfds"]
    assert (sliced.location, sliced.split) == ("gsm8k", "train[:500]")
    mapped = examples["hf:data/math#train?domain=math&question=problem&answer=solution"]
    assert (mapped.split, mapped.columns["answer"]) == ("train", "solution")
    assert examples["problems/mine.jsonl#valid"].split == "valid"
    asset = next(spec for spec in examples.values() if spec.kind == "asset")
    assert len(load([asset.text])) == 500


def test_a_package_that_a_data_set_needs_is_named(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")

    def failing(error):
        def unprepared(name, **_):
            raise error

        monkeypatch.setattr(tfds, "data_source", unprepared)
        return problems(f"tfds:gsm8k/train?domain=math&data_dir={tmp_path}")[0]

    want = "it needs the package 'needed': pip install needed"
    assert want in failing(ImportError("absent", name="needed"))
    wrapped = ImportError("Failed to write: absent")  # as tfds does on the way out
    wrapped.__cause__ = ImportError("absent", name="needed")
    assert want in failing(wrapped)
    assert "DLL load failed; install what is missing" in failing(ImportError("DLL load failed"))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets.text.gsm8k", None)
    assert "it needs the package 'tensorflow_datasets.text.gsm8k'" in failing(ValueError("unknown"))


def test_a_data_set_that_is_not_prepared_is_written_without_tensorflow(monkeypatch):
    tfds, asked = pytest.importorskip("tensorflow_datasets"), []
    rows = [{"question": b"What is 1 + 1?", "answer": b"#### 2"}]

    def data_source(name, **settings):
        asked.append((name, settings["split"], settings["builder_kwargs"]))
        return rows

    monkeypatch.setattr(tfds, "data_source", data_source)
    (task,) = load(["tfds:gsm8k/train[:1]?domain=math"])
    assert task.question == "What is 1 + 1?"
    assert asked == [("gsm8k", "train[:1]", {"file_format": "array_record"})]
    needed = (Path(__file__).parents[1] / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("importlib_resources>=") for line in needed)
    assert "name it as hf:FOLDER" in problems("tfds:huggingface:gsm8k/train")[0]
