"""A dry run says when the mesh does not take all devices."""

import contextlib
import re

import pytest
from test_dryrun import sizes_only, small  # noqa: F401

from sage_jax import modes
from sage_jax.config import ConfigError
from sage_jax.dryrun import mode
from sage_jax.dryrun.measure import Measured


@pytest.mark.parametrize(
    ("sizes", "words"), [((1, 1, 1), "the mesh takes 1 of 8 devices"), ((1, 4, 2), "")]
)
def test_devices_that_the_mesh_leaves_out_are_told(
    sizes_only,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
    sizes,
    words,
):
    monkeypatch.setattr(mode, "measure", lambda program: Measured(program.name, 0.1, 0, 0, 0, 1))
    monkeypatch.setattr(mode, "search_all", lambda *args: {})
    fields = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), sizes, strict=True))
    config, output = small(sizes_only, **fields), tmp_path / "out.json"
    with contextlib.suppress(KeyError):  # no verdict was searched for
        modes.run_dryrun(
            modes.Job(config, {}, tmp_path, tmp_path, output, topology="cpu:8"), lambda: False
        )
    said = capsys.readouterr().err
    assert words in said and ("WARNING" in said) == bool(words)


def test_flags_of_places_are_left_out_of_the_command_with_their_values():
    given = ["--config=a.py", "--output", "x y.json", "--workdir=w", "-output=z", "--topology", "t"]
    assert mode._without(given, ("output", "workdir")) == ["--config=a.py", "--topology", "t"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens__max_prompt": 1000, "rollout__buckets": (2000,)}, "the model has 256 positions"),
        ({"method__prompts": "nosuch"}, "method.prompts='nosuch'"),
        ({"model__attention": "cudnn"}, "model.attention=cudnn: needs a GPU"),
        ({"model__path": "/" + "a" * 300}, "model.path=/aaa"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_anything_is_compiled(
    sizes_only,  # noqa: F811
    tmp_path,
    monkeypatch,
    fields,
    words,
):
    monkeypatch.setattr(mode, "measure", None)
    if "rollout__buckets" in fields:
        fields = fields | {"optim__buckets": (2000,)}
    config = small(sizes_only, **fields)
    job = modes.Job(config, {}, tmp_path, tmp_path, tmp_path / "o.json", topology="cpu:8")
    with pytest.raises(ConfigError, match=re.escape(words)):
        modes.run_dryrun(job, lambda: False)
