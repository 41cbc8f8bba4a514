"""What the processes of a run tell each other before JAX connects them."""

import contextlib
import socket
import threading
import time

import pytest
from jax._src.lib import _jax
from process_pair import free_port

from sage_jax.core import rendezvous
from sage_jax.core.ending import ProcessError
from sage_jax.core.rendezvous import Told, agree


@pytest.fixture
def coordinator():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER", 0.3)
    monkeypatch.setattr(rendezvous, "SETTLE", 0.02)
    monkeypatch.setattr(rendezvous, "RETRY", 0.02)


def all_of(coordinator, *told, timeout=20.0):
    """What each process hears, "" for an agreement; the last of `told` starts first."""
    heard = ["not done"] * len(told)

    def one(place):
        try:
            agree(coordinator, told[place], timeout)
            heard[place] = ""
        except ProcessError as error:
            heard[place] = str(error)

    threads = [threading.Thread(target=one, args=(place,)) for place in reversed(range(len(told)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


@contextlib.contextmanager
def process_0(coordinator, count, timeout=20.0):
    """What process 0 of `count` hears, once the block is left."""
    heard = []
    thread = threading.Thread(
        target=lambda: heard.extend(all_of(coordinator, Told(0, count, "N", "I"), timeout=timeout))
    )
    thread.start()
    yield heard
    thread.join(30)


def connected(coordinator, said=b""):
    """A connection to process 0, as soon as that listens, over which `said` was sent."""
    host, port = coordinator.split(":")
    until = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((host, int(port)), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)
        else:
            connection.sendall(said)
            return connection


def named(*counts, variable="NUM_PROCESSES"):
    return [Told(index, count, variable, "I") for index, count in enumerate(counts)]


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
    mine, other = Told(0, 4, "JAX_NUM_PROCESSES", "I"), Told(1, 2, "SLURM_NTASKS", "I")
    said = "SLURM_NTASKS=2 in process 1, but JAX_NUM_PROCESSES=4 in process 0"
    assert all(text.startswith(said) for text in all_of(coordinator, mine, other))


def test_those_that_do_not_come_are_named_to_all_that_did(coordinator):
    here, there = all_of(coordinator, Told(0, 4, "N", "I"), Told(2, 4, "N", "I"), timeout=0.5)
    assert here == there and "process 1, 3 of 4 did not come within 0.5 s" in here


def test_without_process_0_the_others_end_too(coordinator):
    (said,) = all_of(coordinator, Told(1, 2, "N", "I"), timeout=0.3)
    assert f"process 0 of 2 does not answer at {coordinator} after 0.3 s" in said


NOISE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b"\xff\n",
    b"",
    b"[" * 4000 + b"\n",
    b"\0" * 5000,
    b'{"index": [1], "count": 2, "counted_by": "N", "numbered_by": "I"}\n',
    b'{"index": "1", "count": 2, "counted_by": "N", "numbered_by": "I"}\n',
    b'{"index": true, "count": 2, "counted_by": "N", "numbered_by": "I"}\n',
    b'{"index": 1, "count": {"a": 1}, "counted_by": "N", "numbered_by": "I"}\n',
    b'{"index": 1, "count": 2, "counted_by": null, "numbered_by": "I"}\n',
    b'{"index": 7, "count": 2, "counted_by": "N", "numbered_by": "I"}\n',
    b'{"index": 0, "count": 2, "counted_by": "N", "numbered_by": "I"}\n',
    b'{"index": -1, "count": 2, "counted_by": "N", "numbered_by": "I"}\n',
]


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
def test_strangers_at_the_port_do_not_count(coordinator, noise):
    with process_0(coordinator, 2) as heard, connected(coordinator, noise):
        assert all_of(coordinator, Told(1, 2, "N", "I")) == [""]
    assert heard == [""]
    with process_0(coordinator, 2, timeout=0.3) as heard, connected(coordinator, noise):
        pass
    assert "process 1 of 2 did not come within 0.3 s" in heard[0]


def test_silent_and_dripping_strangers_delay_nobody(coordinator, monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER", 60)
    with contextlib.ExitStack() as strangers:
        heard = strangers.enter_context(process_0(coordinator, 2))
        for _ in range(6):
            strangers.enter_context(connected(coordinator, b"{"))
        assert all_of(coordinator, Told(1, 2, "N", "I")) == [""]
    assert heard == [""]


def test_a_dripping_stranger_does_not_hold_process_0_past_its_timeout(coordinator):
    with process_0(coordinator, 2, timeout=0.3) as heard, connected(coordinator) as stranger:
        until = time.monotonic() + 10
        while not heard and time.monotonic() < until:
            with contextlib.suppress(OSError):
                stranger.sendall(b"{")
            time.sleep(0.01)
        assert "process 1 of 2 did not come within 0.3 s" in heard[0]


@pytest.mark.parametrize("indices", [(0, 1, 1), (0, 1, 1, 2), (0, 2, 1, 2)])
def test_a_number_that_two_were_given_is_told_to_all(coordinator, indices):
    twin = max(indices, key=indices.count)
    told = [Told(index, 4, "N", "I") for index in indices]  # process 3 keeps the others waiting
    for said in all_of(coordinator, *told):
        assert said.startswith(f"number {twin} (by I) was given to two processes")


def test_a_twin_that_comes_when_all_are_there_is_told_to_all(coordinator, monkeypatch):
    monkeypatch.setattr(rendezvous, "SETTLE", 20)
    told = [Told(0, 2, "N", "I"), Told(1, 2, "N", "PROCESS_ID"), Told(1, 2, "N", "SLURM_PROCID")]
    said = "number 1 (by PROCESS_ID and SLURM_PROCID) was given to two processes"
    assert all(text.startswith(said) for text in all_of(coordinator, *told))


def test_a_twin_that_comes_after_all_have_agreed_is_told_that_the_run_has_begun(coordinator):
    port = coordinator.split(":")[1]
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", 2)  # as JAX in process 0
    (said,) = all_of(coordinator, Told(1, 2, "N", "SLURM_PROCID"), timeout=0.5)
    service.shutdown()
    assert f"the run at {coordinator} has begun without this process: number 1" in said
    assert "(by SLURM_PROCID) was given to another one too" in said


FIRST_OF_3 = b'{"index": 1, "count": 3, "counted_by": "N", "numbered_by": "I"}\n'


def test_one_that_left_and_comes_again_is_no_twin(coordinator):
    with process_0(coordinator, 3) as heard:
        connected(coordinator, FIRST_OF_3).close()
        assert all_of(coordinator, Told(1, 3, "N", "I"), Told(2, 3, "N", "I")) == ["", ""]
    assert heard == [""]


def test_one_that_left_is_missing(coordinator):
    with process_0(coordinator, 3, timeout=0.5) as heard:
        connected(coordinator, FIRST_OF_3).close()
    assert "process 1, 2 of 3 did not come within 0.5 s, or left again" in heard[0]


@pytest.mark.parametrize(
    "answer", [b'{"a":1}\n', b"null\n", b"0\n", b"[" * 4000 + b"\n", b"HTTP\n", b'"', b"x" * 5000]
)
def test_an_answer_that_is_none_of_process_0_is_refused(coordinator, answer):
    host, port = coordinator.split(":")
    with socket.create_server((host, int(port))) as server, contextlib.ExitStack() as stack:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    stack.enter_context(server.accept()[0]).sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        (said,) = all_of(coordinator, Told(1, 2, "N", "I"), timeout=0.2)
    assert f"process 0 of 2 does not answer at {coordinator} after 0.2 s" in said


def test_a_dripping_server_holds_nobody_past_the_deadline(coordinator):
    host, port = coordinator.split(":")
    heard = []
    with socket.create_server((host, int(port))) as server:
        one = threading.Thread(
            target=lambda: heard.extend(all_of(coordinator, Told(1, 2, "N", "I"), timeout=0.2))
        )
        one.start()
        with server.accept()[0] as connection:
            until = time.monotonic() + 10
            while not heard and time.monotonic() < until:
                with contextlib.suppress(OSError):
                    connection.sendall(b" ")
                time.sleep(0.01)
        assert "process 0 of 2 does not answer" in heard[0]
        one.join(30)


def test_a_socket_that_tcp_connected_to_itself_is_not_process_0(coordinator, monkeypatch):
    def to_itself(address, timeout):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.settimeout(timeout)
        connection.bind(address)
        connection.connect(address)
        return connection

    monkeypatch.setattr(socket, "create_connection", to_itself)
    (said,) = all_of(coordinator, Told(1, 2, "N", "I"), timeout=0.2)
    assert "does not answer" in said and "(nobody listens)" in said


def test_a_port_that_is_taken_is_named(coordinator):
    host, port = coordinator.split(":")
    with socket.create_server((host, int(port))):
        (said,) = all_of(coordinator, Told(0, 2, "N", "I"))
    assert f"port {port} of the coordinator cannot be opened here" in said
    assert "another process here has number 0 too (by I)" in said
