"""What the processes of a run tell each other before JAX connects them."""

import socket
import threading
import time

import pytest

from sage_jax.core import rendezvous
from sage_jax.core.ending import ProcessError
from sage_jax.core.rendezvous import Told, agree


@pytest.fixture
def coordinator():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER", 0.3)
    monkeypatch.setattr(rendezvous, "RETRY", 0.02)


def all_of(coordinator, *told, timeout=20.0):
    """What each process hears, "" for an agreement; the last of `told` starts first."""
    heard = {}

    def one(mine):
        try:
            agree(coordinator, mine, timeout)
            heard[mine.index] = ""
        except ProcessError as error:
            heard[mine.index] = str(error)

    threads = [threading.Thread(target=one, args=(mine,)) for mine in reversed(told)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [heard[mine.index] for mine in told]


def named(*counts, variable="NUM_PROCESSES"):
    return [Told(index, count, variable) for index, count in enumerate(counts)]


def test_processes_that_were_told_the_same_agree_and_leave_the_port(coordinator):
    assert all_of(coordinator, *named(4, 4, 4, 4)) == [""] * 4
    assert all_of(coordinator, *named(2, 2)) == [""] * 2


@pytest.mark.parametrize("counts", [(2, 3), (3, 2), (3, 3, 4), (4, 3, 4)])
def test_different_numbers_are_told_to_all_with_the_variable_and_both_values(coordinator, counts):
    said = set(all_of(coordinator, *named(*counts)))
    (odd,) = (i for i, count in enumerate(counts) if i and count != counts[0])
    assert said == {
        f"NUM_PROCESSES={counts[odd]} in process {odd}, but NUM_PROCESSES={counts[0]} in process "
        "0: give all processes of a run the same number"
    }


def test_each_side_names_its_own_variable(coordinator):
    mine, other = Told(0, 4, "JAX_NUM_PROCESSES"), Told(1, 2, "SLURM_NTASKS")
    said = "SLURM_NTASKS=2 in process 1, but JAX_NUM_PROCESSES=4 in process 0"
    assert all(text.startswith(said) for text in all_of(coordinator, mine, other))


def test_those_that_do_not_come_are_named_to_all_that_did(coordinator):
    here, there = all_of(coordinator, Told(0, 4, "N"), Told(2, 4, "N"), timeout=0.5)
    assert here == there and "process 1, 3 of 4 did not come within 0.5 s" in here


def test_without_process_0_the_others_end_too(coordinator):
    (said,) = all_of(coordinator, Told(1, 2, "N"), timeout=0.3)
    assert f"process 0 of 2 does not answer at {coordinator} after 0.3 s" in said


def test_strangers_at_the_port_and_those_that_leave_again_do_not_count(coordinator):
    host, port = coordinator.split(":")
    results = []
    main = threading.Thread(target=lambda: results.extend(all_of(coordinator, Told(0, 2, "N"))))
    main.start()
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff\n", b""):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                with socket.create_connection((host, int(port)), 5) as stranger:
                    stranger.sendall(noise)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    with socket.create_connection((host, int(port)), 5) as gone:
        gone.sendall(b'{"index": 1, "count": 2, "variable": "N"}\n')
    main.join(30)
    assert results == [""]


def test_a_port_that_is_taken_is_named(coordinator):
    host, port = coordinator.split(":")
    with socket.create_server((host, int(port))):
        (said,) = all_of(coordinator, Told(0, 2, "N"))
    assert f"port {port} of the coordinator cannot be opened here" in said
