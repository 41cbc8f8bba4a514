"""What each of two processes does for tests/test_processes.py: `python in_pair.py FOLDER`.

Each writes facts0.json or facts1.json, process 0 the arrays of all devices in arrays.npz. At the
end process 1 kills itself, and process 0 waits for it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import test_engine
import test_lora
import test_update
from flax.traverse_util import flatten_dict, unflatten_dict
from test_train import small_config

from sage_jax import modes
from sage_jax.core import distributed, hosts
from sage_jax.core.mesh import DECODE_RULES, UPDATE_RULES, Layout, make_mesh, put, whole
from sage_jax.learn.pack import pack
from sage_jax.learn.update import host_metrics
from sage_jax.methods.graph import Cancelled, judge
from sage_jax.models import hf, qwen_params
from sage_jax.models.lora import adapter_table
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.verdicts import SharedVerifier
from sage_jax.runtime import ASSETS, Placement, decode_weights
from sage_jax.verify import Job, Verdict

MESHES = [(8, 1, 1), (2, 4, 1), (1, 2, 4)]
GENERATE = [
    {"id": "a", "messages": [{"role": "user", "content": "2 + 3"}], "n": 3, "max_new_tokens": 8},
    {"id": "b", "prompt": "add 7", "temperature": 0, "max_new_tokens": 12},
    {"id": "bad"},
]
SCORE = [{"id": "x", "tokens": [1, 2, 3, 4]}, {"id": "y", "tokens": list(range(5, 25))}]


def main(folder):
    distributed.HEARTBEAT_TIMEOUT = 10
    distributed.start()
    for sizes in (*MESHES, (2, 2, 2)):
        hosts.meet(make_mesh(*sizes))
    facts, arrays = {}, {}
    facts["hosts"] = host_facts(folder)
    facts["verdicts"] = verdicts()
    for sizes in MESHES:
        for name, values in training(sizes).items():
            arrays |= {f"{name} {sizes} {key}": value for key, value in values.items()}
        print("trained on", sizes, time.process_time(), flush=True)
    facts["tokens"] = [tokens(attend) for attend in ("xla", "blocked")]
    export(folder)
    print("exported", time.process_time(), flush=True)
    facts["modes"] = every_mode(folder)
    print("went through all modes", time.process_time(), flush=True)
    (folder / f"facts{hosts.index()}.json").write_text(json.dumps(facts))
    if hosts.first():
        np.savez(folder / "arrays.npz", **arrays)
    hosts.gather("")
    if not hosts.first():
        os.kill(os.getpid(), signal.SIGKILL)
    hosts.gather("")


def refusal(work):
    try:
        work()
    except (ValueError, OSError, Cancelled) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def host_facts(folder):
    index = hosts.index()

    def local_fault():
        with hosts.together():
            if index == 1:
                raise FileNotFoundError("no such disk")

    hosts.SEEN_WITHIN = 0.5
    (folder / str(index)).mkdir()
    return {
        "gathered": hosts.gather({"process": index, "text": "é" * 2000 * index}),
        "empty": hosts.gather(""),
        "any": [hosts.any_of(index == 1), hosts.any_of(False)],
        "fault": refusal(local_fault),
        "differing": refusal(lambda: hosts.check_same({"a": "same", "b": f"b{index}"})),
        "apart": refusal(lambda: hosts.check_shared(folder / str(index))),
        "shared": refusal(lambda: hosts.check_shared(folder)),
    }


class Judge:
    """A verifier that names its process; that of process 1 is slow. It never judges "?"."""

    isolation, isolation_report = "A namespaced", "sandbox=A"

    def __init__(self):
        self.jobs, self.closed = [], False
        if hosts.index() == 1:
            self.isolation, self.isolation_report = "B filtered", "sandbox=B"

    def submit(self, job):
        self.jobs.append((job, time.monotonic() + 0.3 * hosts.index()))

    def poll(self, timeout=0.0):

        time.sleep(timeout)
        due = [job for job, due in self.jobs if due <= time.monotonic()]
        done = [job for job in due if job.payload["answer"] != "?"]
        self.jobs = [(job, due) for job, due in self.jobs if job not in done]
        return [(job.id, Verdict("wrong", f"by {hosts.index()}", 1.5)) for job in done]


def verdicts():

    shared = SharedVerifier(Judge())
    for i, answer in enumerate("abcdcb"):
        shared.submit(Job(f"j{i}", "math_key", {"answer": answer}))
    polls = []
    while shared.waiting():
        if found := shared.poll(0.05):
            polls.append([(name, verdict.reason) for name, verdict in found])
    other = Job("other", "math_key", {"answer": "e"})
    shared.submit(other)
    twice = refusal(lambda: shared.submit(other))
    ran = judge(shared, [Job(f"r{i}", "math_key", {"answer": a}) for i, a in ((1, "f"), (0, "a"))])
    asked = 0

    def stop():  # of process 1 alone, after a while
        nonlocal asked
        asked += 1
        return hosts.any_of(not hosts.first() and asked > 3)

    stopped = refusal(lambda: judge(shared, [Job("never", "math_key", {"answer": "?"})], stop=stop))
    return {
        "polls": polls,
        "ran": {name: verdict.reason for name, verdict in ran.items()},
        "twice": twice,
        "stopped": [stopped, asked],
        "isolation": [shared.isolation, shared.isolation_report],
    }


def training(sizes):
    """Loss, gradients, one update and samples after it, of full fine-tuning and of an adapter."""

    place = Placement(None, None, {})
    if sizes:
        mesh = make_mesh(*sizes)
        place = Placement(Layout(mesh, UPDATE_RULES), Layout(mesh, DECODE_RULES), {})
    layout = place.update
    update, state = test_update.make_update(layout=layout)
    tuned, tuned_state = test_lora.make_update(layout=layout, adapter=some_adapter(layout))
    return {
        "full": one_update(update, state, place),
        "lora": one_update(tuned, tuned_state, place),
    }


def some_adapter(layout):
    """An adapter with both factors random, the same on any mesh."""
    rng, factors = np.random.default_rng(0), {}
    for name, p in adapter_table(test_lora.CFG, test_lora.RANK).items():
        where = None if layout is None else layout.sharding(p.axes, p.shape)
        factors[name] = put(0.2 * rng.standard_normal(p.shape, np.float32), where)
    return unflatten_dict(factors, sep=".")


def one_update(update, state, place):
    packed = pack(test_update.make_rows(), test_update.ROLES, [12], 8)
    grads = test_update.gradients(update, state, packed).grads
    found = {f"grad {name}": whole(x) for name, x in flat(grads).items()}
    state, metrics = update.step(state, packed)
    found |= {f"param {name}": whole(x) for name, x in flat(state.params).items()}
    found |= {f"metric {name}": np.array(x) for name, x in host_metrics(metrics).items()}
    base, adapter = state.frozen, state.params
    if base is None:  # with an adapter that adds nothing: both are sampled by the same programs
        base, adapter = state.params, jax.tree.map(jnp.zeros_like, some_adapter(place.update))
    weights = test_lora.attached(base, adapter)
    for done in test_lora.sampled(test_update.CFG, weights, place):
        found |= {f"tokens {done.row.id}": done.tokens, f"logps {done.row.id}": done.logps}
    return found


def flat(tree):
    return flatten_dict(tree, sep=".")


def tokens(attend):
    """Ids of many rows on few slots, by row."""
    layout = Layout(make_mesh(2, 4, 1), DECODE_RULES)
    params = qwen_params.init(test_engine.CFG, jax.random.key(0), layout=layout)
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)
    engine = Engine(
        test_engine.CFG,
        slots=8,
        buckets=test_engine.BUCKETS,
        max_new=24,
        chunk=5,
        prefill_rows=8,
        layout=layout,
        attend=attend,
    )
    place = Placement(layout, layout, {})
    engine.start(decode_weights(params, test_engine.CFG, place, "float32"))
    return {name: c.tokens.tolist() for name, c in engine.generate(test_engine.rows(12)).items()}


def export(folder):

    layout = Layout(make_mesh(2, 2, 2), UPDATE_RULES)
    params, cfg = hf.load(ASSETS / "tiny-qwen3", layout=layout)
    hf.export(params, cfg, folder / "exported")


def every_mode(folder):
    """Exit codes of generate, score and eval."""

    config = small_config("asset:tiny-qwen3", mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    codes = []
    for mode in ("generate", "score", "eval", "sft"):
        files = (folder / f"{mode}.in", folder / f"{mode}.out")
        job = modes.Job(config, {"model.path": ""}, folder / "eval", *files)
        codes.append(refusal(lambda: result(modes.run(mode, job, lambda: False))))  # noqa: B023
    return codes


def result(code):
    raise ValueError(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
