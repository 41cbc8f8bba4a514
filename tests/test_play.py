"""How a rollout is conducted: what waits for what. A slow or dead verifier costs time, no more."""

import dataclasses
import io
import time

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedVerifier, config, seeds

from sage_jax.methods import graph
from sage_jax.methods.graph import Episode, Node, Player, play
from sage_jax.report.progress import Progress
from sage_jax.verify import Job


def ask(episode):
    return [{"role": "user", "content": episode.id}]


def judged(episode, sample):
    return Job(sample.id, "math", {"gold": "1", "prediction": "1"})


def chained(*kinds, jobs=()):
    """Nodes that follow one another; those of `jobs` ask for a verdict."""
    return tuple(
        Node(
            kind,
            "solver",
            ask,
            parents=kinds[i - 1 : i],
            **({"job": judged} if kind in jobs else {}),
        )
        for i, kind in enumerate(kinds)
    )


def episodes(nodes, count=1, name="e"):
    return [Episode(f"{name}{i}", seeds(1)[0], nodes) for i in range(count)]


class Conducted:
    """A play on scripts that writes down, in order, what started, ended and was waited for."""

    def __init__(self, slots, lag=0, lengths=lambda row_id: 1):
        self.engine = SlotEngine(slots, lengths)
        self.verifier = ScriptedVerifier(lambda job: ("correct", ""), lag=lag)
        self.log = self.engine.log

    def play(self, made):
        player = Player(config(), Bytes(), 1, 1.0)
        return play(self.engine, self.verifier, made, player, stage=self.stage)

    def stage(self, name, pending):
        if name == "verify" and self.log[-1:] != ["wait"]:
            self.log.append("wait")


class SlotEngine(ScriptedEngine):
    """Rows hold a slot for `lengths(row id)` chunks; the highest rank starts first."""

    def __init__(self, slots, lengths):
        super().__init__(lambda row_id: "<answer>1</answer>", slots)
        self.lengths, self.live, self.log = lengths, {}, []

    @property
    def busy(self):
        return bool(self.queue or self.live)

    @property
    def hungry(self):
        return len(self.queue) + len(self.live) < self.width

    def running(self):
        return list(self.live)

    def step(self, meanwhile=lambda: None):
        self.queue.sort(key=lambda row: -row.rank)
        while self.queue and len(self.live) < self.width:
            row = self.queue.pop(0)
            self.live[row.id] = [row, self.lengths(row.id)]
            self.log.append(f"start {row.id}")
        meanwhile()
        for entry in self.live.values():
            entry[1] -= 1
        ended = [row for row, left in self.live.values() if left == 0]
        rest, self.queue = self.queue, ended
        width, self.width = self.width, len(ended)
        done = super().step()
        self.queue, self.width = rest, width
        for row in ended:
            del self.live[row.id]
            self.log.append(f"end {row.id}")
        return done


def test_a_verdict_is_not_waited_for_while_queued_rows_can_take_the_slots():
    made = Conducted(slots=1)
    made.play([*episodes(chained("a", "b", jobs=("a",))), *episodes(chained("x"), 3, "f")])
    assert made.log == [
        *("start e0/a/0", "end e0/a/0"),
        *("start f0/x/0", "end f0/x/0", "start f1/x/0", "end f1/x/0", "start f2/x/0", "end f2/x/0"),
        *("wait", "start e0/b/0", "end e0/b/0"),
    ]


@pytest.mark.parametrize("more", [1, 4])
def test_a_free_slot_waits_for_a_verdict_only_some_chunks_after_it_was_asked_for(more):
    chunks = graph.PATIENCE + 2 + more  # one before it is asked, one in which the follower ends
    made = Conducted(slots=2, lengths=lambda row_id: chunks if "x" in row_id else 1)
    made.play([*episodes(chained("a", "b", jobs=("a",))), *episodes(chained("x"), 1, "f")])
    assert made.log == [
        *("start e0/a/0", "start f0/x/0", "end e0/a/0"),
        *("wait", "start e0/b/0", "end e0/b/0", "end f0/x/0"),
    ]


def test_verdicts_that_open_nothing_are_waited_for_once_at_the_end():
    made = Conducted(slots=2, lag=2)
    made.play(episodes(chained("a", jobs=("a",)), 4))
    assert made.log.count("wait") == 1 and made.log[-1] == "wait"


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_how_fast_the_verifier_is_changes_no_row_and_no_order(slots):
    logs = []
    for lag in (0, 1, 7):
        made = Conducted(slots, lag, lengths=lambda row_id: 1 + len(row_id) % 3)
        nodes = (*chained("a", "b", "c", jobs=("a", "c")), Node("d", "critic", ask, fan_out=2))
        made.play(episodes(nodes, 4))
        logs.append([line for line in made.log if line != "wait"])
    assert logs[0] == logs[1] == logs[2]


def test_rows_with_most_to_follow_start_first_and_programs_before_sums():
    math, code = seeds(1)
    nodes = (*chained("a", "b", jobs=("a",)), Node("short", "critic", ask))
    made = Conducted(slots=1)
    made.play([Episode("m", math, nodes), Episode("c", code, nodes)])
    started = [line.split()[1] for line in made.log if line.startswith("start")]
    assert started[:2] == ["c/a/0", "m/a/0"] and set(started[2:4]) == {"c/short/0", "m/short/0"}


def test_a_chain_counts_the_rows_and_verdicts_that_come_one_after_another():
    nodes = (*chained("a", "b", "c", jobs=("a", "c")), Node("d", "critic", ask, parents=("a",)))
    episode = episodes(nodes)[0]
    assert [episode.chain(node) for node in nodes] == [5, 3, 2, 1]


class Silent(ScriptedVerifier):
    def poll(self, timeout=0.0):
        return []


def test_a_verifier_that_says_nothing_masks_the_rows_and_the_step_ends(monkeypatch):
    monkeypatch.setattr(graph, "SILENCE", 0.0)
    told = []
    made = Conducted(slots=2)
    made.verifier = Silent(lambda job: ("correct", ""))
    made.stage = lambda name, pending: told.append((name, list(pending())))
    some = episodes(chained("a", "b", jobs=("a",)), 2)
    made.play(some)
    for episode in some:
        (sample,) = episode.samples["a"]
        assert sample.masked and sample.judged.reason == "verifier_error"
        assert episode.samples["b"][0].done
    assert ("verify", ["e0/a/0 (1 s)", "e1/a/0 (1 s)"]) in told
    assert ("rollout", []) in told


@pytest.mark.parametrize("kinds", [("a", "b"), ("a",)])
def test_a_stop_is_seen_while_verdicts_are_awaited(kinds):
    """In the middle of a rollout and at its end."""
    made, polls = Conducted(slots=2), []
    made.verifier = Silent(lambda job: ("correct", ""))
    made.verifier.poll = lambda timeout=0.0: polls.append(timeout) or []
    player = Player(config(), Bytes(), 1, 1.0)
    with pytest.raises(graph.Cancelled):
        play(
            made.engine,
            made.verifier,
            episodes(chained(*kinds, jobs=("a",))),
            player,
            stage=made.stage,
            stop=lambda: len(polls) >= 3,
        )
    assert made.log[-1] == "wait" and len(polls) == 3
    assert max(polls) <= 1  # seconds until the next look


def test_verdicts_that_belong_to_no_row_are_named_while_awaited_and_end_at_a_stop():
    jobs = [Job(name, "math", {"gold": "1", "prediction": "1"}) for name in "ba"]
    told, verifier = [], ScriptedVerifier(lambda job: ("wrong", job.id), lag=2)
    found = graph.judge(verifier, jobs, stage=lambda name, pending: told.append(pending()))
    assert [(name, v.reason) for name, v in found.items()] == [("b", "b"), ("a", "a")]
    assert told == [["a (1 s)", "b (1 s)"]] * 3
    with pytest.raises(graph.Cancelled):
        graph.judge(Silent(lambda job: ("wrong", "")), jobs, stop=lambda: True)


def test_what_is_waited_for_is_named_longest_first():
    made = Conducted(slots=1)
    made.verifier.waiting = lambda: {"a": 2.0, "b": 31.2, "c": 5.0}
    assert graph._waits(made.verifier, {"a", "b"}) == ["b (31 s)", "a (2 s)"]


def test_an_episode_is_looked_at_only_when_something_of_it_is_done(monkeypatch):
    looked = []
    opened = graph._Run._open
    monkeypatch.setattr(
        graph._Run, "_open", lambda run, e: (looked.append(e.id), opened(run, e))[1]
    )
    Conducted(slots=1).play(episodes(chained("a", "b"), 3))
    assert len(looked) == 3 + 2 * 3


def test_rank_reaches_the_engine():
    made = Conducted(slots=3)
    (episode,) = episodes(chained("a", "b"))
    made.play([episode])
    assert [row.rank for row in made.engine.seen] == [4, 2]
    assert dataclasses.replace(made.engine.seen[0], rank=0).rank == 0


def heard(said, *words):
    lines = [line for line in said.getvalue().splitlines() if all(word in line for word in words)]
    return lines[0] if lines else ""


def test_a_stall_is_named_by_the_heartbeat_and_the_step_still_ends(monkeypatch):
    monkeypatch.setattr(graph, "SILENCE", 0.0)
    said = io.StringIO()

    def until_heard(*words):
        until = time.monotonic() + 30
        while not heard(said, *words) and time.monotonic() < until:
            time.sleep(0.01)

    class Slow(SlotEngine):
        """A chunk that takes longer than the heartbeat's patience, as a row without end would."""

        def running(self):
            return [f"{name} (7 of at most 9 tokens)" for name in self.live]

        def step(self, meanwhile):
            done = super().step(meanwhile)
            if self.live:
                until_heard("rollout", "e0/a/0")
            return done

    class SlowToo(Silent):
        def poll(self, timeout=0.0):
            until_heard("verify", "e0/a/0")
            return []

    made = Conducted(slots=2)
    made.engine = Slow(2, lambda row_id: 3)
    made.verifier = SlowToo(lambda job: ("correct", ""))
    some = episodes(chained("a", jobs=("a",)))
    with Progress(1, stream=said, heartbeat=0.1) as progress:
        made.stage = progress.stage
        made.play(some)
    assert heard(said, "rollout", "e0/a/0 (7 of at most 9 tokens)")
    assert heard(said, "verify", "e0/a/0 (1 s)")
    assert some[0].samples["a"][0].done
    assert config().report.heartbeat <= 29  # looked at once a second
