"""The dry run: what it counts, what it says, and that it compiles the programs of a real run."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from sage_jax import config as schema
from sage_jax import modes
from sage_jax.config import ConfigError
from sage_jax.core import chips, flops
from sage_jax.core.mesh import Layout, make_mesh
from sage_jax.dryrun import mode, search
from sage_jax.dryrun.measure import Measured
from sage_jax.dryrun.programs import StepPrograms, bytes_per_chip
from sage_jax.dryrun.timing import FULL, Timing
from sage_jax.learn.update import init_state
from sage_jax.models import costs, lora, qwen_params
from sage_jax.report import dryrun as report
from sage_jax.runtime import placement

GIB = 2**30


def small(folder, **fields):
    """A config of few rows; `a__b=value` sets a.b."""
    c = schema.base()
    c.model.path = str(folder)
    c.tokens.max_prompt = 48
    for role in schema.ROLES:
        c.rollout.max_new[role] = 16
    c.rollout.buckets = c.optim.buckets = (64,)
    c.rollout.slots, c.rollout.prefill_rows, c.optim.micro_rows = 16, 8, 8
    c.method.candidates, c.method.drawn, c.train.steps = 4, 4, 2
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 1, 4, 2
    for name, value in fields.items():
        group, leaf = name.split("__")
        c[group][leaf] = value
    return schema.validate(c)


@pytest.fixture(scope="module")
def sizes_only(tiny_folder, tmp_path_factory):
    """A model folder that holds nothing but its config.json."""
    folder = tmp_path_factory.mktemp("sizes")
    shutil.copy(tiny_folder / "config.json", folder)
    return folder


@pytest.mark.parametrize("rank", [0, 4])
def test_the_formula_agrees_with_the_compiler_where_no_loop_hides_work(sizes_only, rank):
    config = small(sizes_only, lora__rank=rank)
    step = StepPrograms(config, mode.read_sizes(str(sizes_only)), placement(config))
    found = mode.cross_check(config, step)
    assert found["ratio"] == pytest.approx(1, abs=0.12)


# ---- the abstract run against a real one


@pytest.mark.parametrize("rank", [0, 8])
def test_abstract_state_is_that_of_a_run(sizes_only, rank):
    config = small(sizes_only, lora__rank=rank)
    place = placement(config)
    step = StepPrograms(config, mode.read_sizes(str(sizes_only)), place)
    params = qwen_params.init(step.cfg, jax.random.key(0), layout=place.update)
    if rank:
        adapter = lora.init(step.cfg, rank, jax.random.key(1), place.update)
        state = init_state(adapter, step.tx, frozen=params)
    else:
        state = init_state(params, step.tx)

    def same(real, abstract):
        alike = real.sharding.is_equivalent_to(abstract.sharding, real.ndim)
        return (real.shape, real.dtype, alike) == (abstract.shape, abstract.dtype, True)

    assert jax.tree.structure(state) == jax.tree.structure(step.state)
    assert all(jax.tree.leaves(jax.tree.map(same, state, step.state)))


def test_bytes_per_chip_counts_shards_and_what_is_whole():
    layout = Layout(make_mesh(1, 4, 2), {"embed": "fsdp", "mlp": "tensor"})
    at = layout.sharding(("embed", "mlp"))
    tree = {
        "split": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=at),
        "whole": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    }
    assert bytes_per_chip(tree) == 8 * 8 * 4 // 8 + 16


def test_what_runs_on_shards_counts_on_every_device():
    mesh = make_mesh(8, 1, 1)
    at = PartitionSpec("data")

    def product(x, y):
        return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(at, PartitionSpec()), out_specs=at)(
            x, y
        )

    traced = jax.jit(product).trace(jnp.zeros((16, 8)), jnp.zeros((8, 4)))
    assert flops.count(traced.jaxpr) == 2 * 16 * 8 * 4


def test_the_mode_prints_a_table_and_writes_its_twin(sizes_only, tmp_path, capsys, monkeypatch):
    # Both have tests of their own; each would compile an update once more.
    for name in ("most_slots", "most_micro_rows"):
        choice = search.Choice(name, 1, None)
        monkeypatch.setattr(search, name, lambda *args, choice=choice: choice)
    monkeypatch.setattr(mode, "cross_check", lambda *args: {})
    config = small(sizes_only)
    job = modes.Job(config, {}, tmp_path, tmp_path, tmp_path / "out.json", topology="cpu:8")
    assert modes.run_dryrun(job, None) == 0
    printed, told = capsys.readouterr()
    assert told.splitlines()[-1] == f"wrote {tmp_path}/out.json"
    result = json.loads((tmp_path / "out.json").read_text())
    names = ["cast", "prefill", "insert", "decode", "score", "update", "apply"]
    assert [p["name"] for p in result["programs"]] == names
    assert all(p["total"] > 0 and p["fits"] for p in result["programs"])
    assert "fits: every program within 90% of memory" in printed and "HBM" not in printed
    assert report.text(result) in printed
    assert [c["field"] for c in result["recommended"]] == ["most_slots", "most_micro_rows"]


def test_a_place_that_takes_no_file_is_refused_before_anything_is_compiled(
    sizes_only, tmp_path, monkeypatch
):
    monkeypatch.setattr(mode, "measure", lambda program: pytest.fail("compiled"))
    output = Path("/proc/result.json")
    job = modes.Job(small(sizes_only), {}, tmp_path, tmp_path, output, topology="cpu:8")
    with pytest.raises(ConfigError, match="/proc/result.json: .*; choose another --output"):
        modes.run_dryrun(job, None)


def test_a_refused_run_leaves_no_folder(sizes_only, tmp_path):
    config = small(sizes_only, mesh__data=1, mesh__fsdp=1, mesh__tensor=3)
    output = tmp_path / "new" / "result.json"
    job = modes.Job(config, {}, tmp_path, tmp_path, output, topology="cpu:8")
    with pytest.raises(ConfigError):
        modes.run_dryrun(job, None)
    assert not output.parent.exists()


def test_a_run_that_does_not_fit_exits_1_and_is_told_what_would(sizes_only, tmp_path, monkeypatch):
    def over(program, buffers=3):
        return Measured(program.name, 0.1, 0, 2 * GIB if program.name == "update" else 0, 0, 1)

    monkeypatch.setattr(chips, "find", lambda name: (jax.devices(), chips.Chip("x", GIB)))
    for module in (mode, search):
        monkeypatch.setattr(module, "measure", over)
    job = modes.Job(small(sizes_only), {}, tmp_path, tmp_path, tmp_path / "o.json", topology="x")
    assert modes.run_dryrun(job, None) == 1
    result = json.loads((tmp_path / "o.json").read_text())
    assert not result["fits"] and result["misfits"] == ["update"]


# ---- search, with measurements that cost nothing


class Fake:
    """A model of memory: each program takes a fixed part and one that grows with its field."""

    def __init__(self, monkeypatch, each_slot, each_row):
        self.compiled = []
        self.each = {"decode": each_slot, "update": each_row}
        monkeypatch.setattr(search, "measure", self.measure)
        monkeypatch.setattr(search, "bytes_per_chip", lambda tree: sum(jax.tree.leaves(tree)))

    def build(self, config):
        return self.Step(config, self.each)

    @dataclasses.dataclass
    class Step:
        config: object
        each: dict
        state = weights = 0

        def decode(self):
            return "decode", self.config.rollout.slots

        def accumulate(self):
            return "update", self.config.optim.micro_rows

        def slots(self):
            return self.config.rollout.slots * self.each["decode"]

        def kept_bytes(self):
            return self.config.optim.micro_rows * self.each["update"]

        def programs(self):
            return {"decode": self.decode, "update": self.accumulate}

    def measure(self, program):
        self.compiled.append(program)
        return self.of(*program)

    def of(self, name, value):
        return Measured(name, 0.1, 1000, value * self.each[name], 0)


def test_the_most_slots_are_interpolated_and_confirmed_in_two_more_compiles(monkeypatch, tmp_path):
    fake, config = Fake(monkeypatch, 10, 10), small(tmp_path)
    chip = chips.Chip("x", 2000)
    measured = {"decode": fake.of("decode", 16)}
    choice = search.most_slots(config, fake.build, chip, measured, 4, 1000)
    assert choice.value == 80 and choice.confirmed.total == 1800
    assert fake.compiled == [("decode", 20), ("decode", 80)]


def test_the_most_rows_of_a_pass_do_not_exceed_those_of_a_step(monkeypatch, tmp_path):
    fake, config = Fake(monkeypatch, 10, 1), small(tmp_path)
    found = fake.of("update", 8)
    choice = search.most_micro_rows(config, fake.build, chips.Chip("x", 9000), found, 8, 30)
    assert choice.value == 32 and len(fake.compiled) == 2
    tight = chips.Chip("x", 1120)
    assert search.most_micro_rows(config, fake.build, tight, found, 8, 30).value == 8
    assert len(fake.compiled) == 2, "what cannot fit is not compiled"


def test_a_choice_that_the_compiler_refuses_gives_way_to_one_that_it_took(monkeypatch, tmp_path):
    fake, config = Fake(monkeypatch, 10, 1), small(tmp_path)
    straight = fake.of
    monkeypatch.setattr(
        fake, "of", lambda name, v: dataclasses.replace(straight(name, v), beside=v > 20 and 9999)
    )
    chip = chips.Chip("x", 2000)
    choice = search.most_slots(config, fake.build, chip, {"decode": fake.of("decode", 16)}, 4, 1000)
    assert choice.value == 20 and choice.confirmed.total == 1200
    rows = search.most_micro_rows(config, fake.build, chip, fake.of("update", 8), 8, 1000)
    assert rows.value == 16 and fake.compiled[-1] == ("update", 800)


def test_what_does_not_fit_gets_the_least_change_that_does(monkeypatch, tmp_path):
    fake, config = Fake(monkeypatch, 10, 10), small(tmp_path, model__remat="full")
    measured = {"decode": fake.of("decode", 16), "update": fake.of("update", 8)}
    chip = chips.Chip("x", 1250)
    assert search.misfits(measured, chip) == ["decode"]
    change, again = search.smallest_change(config, fake.build, chip, measured, 4)
    assert change == {"rollout__slots": 8} and again["decode"].total <= search.limit(chip)
    assert search.smallest_change(config, fake.build, chips.Chip("x", 900), measured, 4) is None


# ---- times


def test_a_step_has_passes_enough_for_its_rows(sizes_only):
    config = small(sizes_only, optim__buckets=(16, 32, 64), optim__micro_rows=4)
    step = StepPrograms(config, mode.read_sizes(str(sizes_only)), placement(config))
    timing = Timing(step, {}, chips.TPUS["v5e"], 8, {})
    assert timing.passes([60] * 9) == [64, 64, 64]
    assert sum(timing.passes([5, 60, 17, 16, 33, 9, 31, 3, 64, 12])) * 4 >= 250


def test_times_follow_the_rates_of_the_chip(sizes_only):
    config = small(sizes_only)
    step = StepPrograms(config, mode.read_sizes(str(sizes_only)), placement(config))
    names = list(step.programs())
    measured = {n: Measured(n, 0.1, 0, 0, 0, flops=10**15) for n in names}
    rows = dict.fromkeys(schema.ROLES, 4)
    chip = chips.TPUS["v5e"]
    once = Timing(step, rows, chip, 8, measured).of(FULL)
    faster = dataclasses.replace(chip, flops=2 * chip.flops)
    twice = Timing(step, rows, faster, 8, measured).of(FULL)
    assert once.seconds["update"] == pytest.approx(2 * 10**15 / 8 / chip.flops)
    assert twice.seconds["update"] == pytest.approx(once.seconds["update"] / 2)
    assert once.new_tokens == 16 * 16
    assert once.hours == pytest.approx(once.total * config.train.steps / 3600)


# ---- messages and the page


def test_sizes_come_from_a_folder_or_from_a_known_name(sizes_only, tmp_path):
    assert mode.read_sizes(str(sizes_only)).num_layers == 2
    assert mode.read_sizes("Qwen/Qwen3-4B-Base").hidden_size == 2560
    with pytest.raises(ConfigError, match="config.json.*or one of Qwen/"):
        mode.read_sizes("Some/Other-Model")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3.09),
        ("Qwen/Qwen3-4B-Base", 4.02),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
    ],
)
def test_known_sizes_give_the_published_number_of_parameters(name, billions):
    total = costs.Weights.of(mode.read_sizes(name)).total
    assert total / 1e9 == pytest.approx(billions, abs=0.01)


def result(**changes):
    program = {"name": "update", "compile_seconds": 61.2, "arguments": GIB, "temporaries": 2 * GIB}
    program |= {"beside": GIB, "total": 4 * GIB, "fits": True, "flops": 2e15}
    program["collectives"] = [{"kind": "all-gather", "count": 3, "bytes": 2_000_000}]
    program["largest"] = [{"bytes": 5_000, "shape": "f32[10]", "source": "head"}]
    base = {"model": "Qwen/X", "trained": "LoRA 8", "topology": "v5e:2x4", "chip": "v5e"}
    base |= {"devices": 8, "hbm": 16 * GIB, "share": 0.9, "mesh": {"data": 1, "fsdp": 8}}
    base |= {"rows": 10, "slots": 64, "micro_rows": 8, "longest": 64, "max_prompt": 32}
    base |= {"max_new": 32, "train_steps": 200, "programs": [program], "command": "--mode=dryrun"}
    base["update"] = {"useful_share": 0.7, "formula": "useful = all", "temporaries": 2 * GIB}
    base["update"] |= {"temporaries_model": GIB, "collective_bytes": 3.0, "fsdp_minimum": 2.0}
    base |= {"cross_check": {}, "fits": True, "misfits": [], "change": None, "recommended": []}
    step = {"load": "all", "seconds": {"decode": 90.0}, "total": 90.0, "new_tokens": 900}
    base["steps"] = [step | {"hours": 5.0}]
    return base | changes


def test_the_table_says_what_fits_and_how_long_a_step_takes():
    text = report.text(result())
    assert "update    61.2 s  1.00  2.00    1.00       4.00     25%   yes  2.00e+15" in text
    assert "3: 2.0 MB" in text and "1.50 x the least" in text
    assert "90.0 s (decode 90.0 s); 10 new tokens/s, 5.0 h for 200 steps" in text


def test_the_table_says_what_its_minutes_leave_out():
    text = report.text(result())
    assert "expect several times more; without verifiers, host, validation and" in text


def test_a_misfit_names_the_flags_that_mend_it():
    change = {"rollout.slots": 32}
    text = report.text(result(fits=False, misfits=["update"], change=change, steps=[]))
    assert "DOES NOT FIT: update above 90% of HBM" in text
    assert "--config.rollout.slots=32" in text
    assert "the rates of v5e are not known" in text
    assert "no change" in report.text(result(fits=False, misfits=["update"]))


@pytest.mark.parametrize(
    ("used", "present", "words"),
    [(1, 8, "1 of 8 devices, each of 16"), (1, 1, "1 device of 16"), (8, 8, "8 devices of 16")],
)
def test_the_table_counts_the_devices_it_means(used, present, words):
    assert f"on v5e:2x4: {words}" in report.text(result(devices=used, present=present))


@pytest.mark.parametrize(
    ("words", "temporaries"),
    [
        ("RESOURCE_EXHAUSTED: Used 3G of 2G hbm.\nmore", 3 * GIB),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.", 0),
        ("INTERNAL: some pass of the compiler\nmore", 0),
    ],
)
def test_whatever_the_compiler_refuses_is_a_misfit_in_its_words(
    sizes_only, tmp_path, monkeypatch, capsys, words, temporaries
):
    compiled = jax.stages.Lowered.compile

    def refuse(lowered, *args):
        if "accumulate" in lowered.as_text()[:200]:
            raise jax.errors.JaxRuntimeError(words)
        return compiled(lowered, *args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    output = tmp_path / "out.json"
    assert mode.run(small(sizes_only, model__remat="dots"), "cpu:8", output) == 1
    said = capsys.readouterr().out
    assert "DOES NOT FIT: update above 90% of memory or refused by the compiler" in said
    first = words.split("\n")[0]
    assert f"  the compiler on update: {first}\n" in said
    update = json.loads(output.read_text())["programs"][5]
    assert update["error"] == first and not update["fits"]
    assert update["temporaries"] == pytest.approx(temporaries, abs=GIB / 100)


def test_page_and_readme_are_filled_from_results(tmp_path):
    file, readme = tmp_path / "a.json", tmp_path / "README.md"
    file.write_text(json.dumps(result()))
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    report.main([str(file), "--page", str(tmp_path / "page.md"), "--readme", str(readme)])
    line = "| X | LoRA 8 | v5e:2x4 | 1x8 | 64 | 8 | yes | 4.0 of 16.0 GiB (update) | 90.0 s | 5 h |"
    assert line in readme.read_text() and line in (tmp_path / "page.md").read_text()
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("after\n")
    assert "old" not in readme.read_text()
    with pytest.raises(ValueError, match="to put the table between"):
        report.fill("no markers", "x")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.02, "20 ms"), (0.87, "0.9 s"), (5, "5.0 s"), (600, "10.0 min"), (9000, "2.5 h")],
)
def test_durations_are_readable(seconds, words):
    assert report.duration(seconds) == words


def test_a_refused_dry_run_leaves_no_folder(sizes_only, tmp_path):
    output = tmp_path / "deep" / "found.json"
    with pytest.raises(ConfigError):
        mode.run(small(sizes_only, mesh__data=3), "cpu:8", output)
    assert not output.parent.exists()
    with pytest.raises(ConfigError, match="is a folder, not a file; choose another --output"):
        mode.run(small(sizes_only), "cpu:8", tmp_path)
