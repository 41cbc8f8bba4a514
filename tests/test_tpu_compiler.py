"""Programs compiled for TPUs that are not there: needs the 'dryrun' extra (`make dryrun-check`)."""

import json
import re

import pytest
from test_dryrun import small

from sage_jax import modes
from sage_jax.core import chips
from sage_jax.dryrun import mode
from sage_jax.dryrun.programs import StepPrograms
from sage_jax.runtime import placement

pytestmark = pytest.mark.tpu_compiler


@pytest.mark.parametrize("name", chips.TOPOLOGIES)
def test_a_topology_has_the_chips_of_its_name(name):
    devices, chip = chips.find(name)
    count = 1
    for n in name.split(":")[1].split("x"):
        count *= int(n)
    assert len(devices) == count * (2 if chip.name == "tpu7x" else 1)
    assert devices[0].platform == "tpu"


def test_the_stack_of_weights_is_not_cast_whole():
    devices, _ = chips.find("v5e:2x4")
    config = small("asset:tiny-qwen3", model__dtype="bfloat16")
    cfg = mode.read_sizes(config.model.path)
    program = StepPrograms(config, cfg, placement(config, devices)).score()
    text = program.trace().lower().compile().as_text()
    assert re.search(r"bf16\[1,\S* (convert|fusion)\(", text)
    assert not re.search(rf"bf16\[{cfg.num_layers},\d+,\d+\S* convert\(", text)


def test_the_programs_of_a_step_compile_for_a_tpu(tiny_folder, tmp_path, monkeypatch):
    from sage_jax.dryrun import search

    for name in ("most_slots", "most_micro_rows"):
        choice = search.Choice(name, 1, None)
        monkeypatch.setattr(search, name, lambda *args, choice=choice: choice)
    # 384 tokens: beyond what plain attention is used for, so that the kernel is compiled as well.
    config = small(
        tiny_folder, rollout__buckets=(64, 384), optim__buckets=(384,), model__dtype="bfloat16"
    )
    job = modes.Job(config, {}, tmp_path, tmp_path, tmp_path / "out.json", topology="v5e:2x4")
    assert modes.run_dryrun(job, None) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    update = next(p for p in result["programs"] if p["name"] == "update")
    kinds = {c["kind"] for c in update["collectives"]}
    assert "all-gather" in kinds and update["temporaries"] > 0
    assert result["cross_check"]["ratio"] == pytest.approx(1, abs=0.2)
    assert result["steps"][0]["total"] > 0
