"""Which rows start next, and which prompts are prefilled together."""

import numpy as np

from sage_jax.rollout.admission import Call, Prefilled, PrefixCache, Queue, plan_calls
from sage_jax.rollout.row import Row


def row(name, prompt=(1,), rank=0):
    return Row(name, prompt, (0, 0), 4, (), rank=rank)


def test_queue_gives_the_highest_rank_first_and_equals_in_the_order_they_came():
    queue = Queue()
    queue.push([row("a"), row("b", rank=2), row("c", rank=1)])
    queue.push([row("d", rank=2), row("e")])
    assert [queue.pop().id for _ in range(len(queue))] == ["b", "d", "c", "a", "e"]


def test_queue_knows_which_prompts_are_still_wanted():
    queue = Queue()
    queue.push([row("a", (1,)), row("b", (1,)), row("c", (2,), rank=-1)])
    queue.pop()
    assert queue.wants((1,)) and queue.wants((2,))
    queue.pop()
    assert not queue.wants((1,)) and list(queue.ahead(9)) == [(2,)]


def prompt(length, name=0):
    return (*range(1, length), name + 100)


def test_every_wanted_prompt_is_in_exactly_one_call_that_holds_it():
    rng = np.random.default_rng(0)
    for _ in range(200):
        wanted = [prompt(int(n), i) for i, n in enumerate(rng.integers(1, 64, rng.integers(1, 20)))]
        ahead = [prompt(int(n), 50 + i) for i, n in enumerate(rng.integers(1, 64, 6))] + wanted[:2]
        calls = plan_calls(wanted, ahead, (2, 8), (16, 32, 64))
        placed = [p for call in calls for p in call.prompts]
        assert len(placed) == len(set(placed)) and set(wanted) <= set(placed)
        for call in calls:
            assert len(call.prompts) <= call.rows and call.rows in (2, 8)
            assert all(len(p) <= call.length for p in call.prompts)
        # Nothing is prefilled early at the price of a call of its own.
        assert all(any(p in wanted for p in call.prompts) for call in calls)


def test_few_prompts_take_the_small_call_and_short_ones_fill_a_long_one():
    long, short, later = prompt(40), prompt(5), prompt(6)
    assert plan_calls([short, long], [later], (2, 8), (16, 64)) == [Call([long, short], 2, 64)]
    assert plan_calls([long], [later, prompt(50)], (2, 8), (16, 64)) == [Call([long, later], 2, 64)]
    five = [prompt(3, i) for i in range(5)]
    assert plan_calls(five, [], (2, 8), (16, 64)) == [Call(five, 8, 16)]


def test_prefix_cache_keeps_the_newest_calls_that_somebody_wants():
    calls = [
        Prefilled({(i,): 0}, np.zeros(1), {"k": np.zeros(1)}, np.ones(1))  # type: ignore[arg-type]
        for i in range(4)
    ]
    cache = PrefixCache(2)
    for call in calls:
        cache.put(call)
    cache.tidy(lambda p: p != (3,))
    assert cache.calls == calls[1:3] and (0,) not in cache and (2,) in cache
