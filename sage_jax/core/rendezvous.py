"""Before JAX connects the processes of a run: are all there, and do all mean the same run?

JAX aborts a process whose companions do not come (exit code 134) and names none of them; processes
that were told different numbers of them fail or hang. So each first tells process 0 what it was
told, over TCP on the coordinator's port; process 0 answers all alike and leaves the port to JAX.
"""

import contextlib
import json
import math
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass

from sage_jax.core.ending import ProcessError

LINGER = 5.0  # seconds in which process 0 still answers those that come after a contradiction
SETTLE = 1.0  # seconds in which process 0, with all there, still listens for a number given twice
LONGEST = 4096  # bytes of a message
NAMED = 20  # missing processes that a message names
RETRY = 0.2  # seconds
# Type, flags and stream of the frame that an HTTP/2 server sends first (RFC 9113, 3.4). JAX's own
# service is one: it has the port from the time on when all processes have agreed.
SETTINGS = b"\x04\0\0\0\0\0"


@dataclass(frozen=True)
class Told:
    """What a process was told: its number, how many there are, and by which variables."""

    index: int
    count: int
    counted_by: str
    numbered_by: str


class _Begun(ConnectionError):
    """The processes of the run have agreed already."""


@dataclass(eq=False)
class _Peer:
    """Whoever connected to process 0, and what came over the connection, which never blocks."""

    connection: socket.socket
    said: bytes = b""
    told: Told | None = None

    def hear(self) -> bool:
        """Takes in what has come; whether it is still there, and may be a process of the run."""
        try:
            while len(self.said) < LONGEST and (part := self.connection.recv(LONGEST)):
                self.said += part
        except BlockingIOError:
            self.told = _understood(self.said)
            return self.told is not None or b"\n" not in self.said
        except OSError:
            pass  # gone, not as usual
        return False


def agree(coordinator: str, told: Told, timeout: float) -> None:
    """Returns when all processes have come and were told the same; to be called by each of them.

    coordinator: host:port of process 0. timeout: seconds to wait for the others. ProcessError, in
    every process that came, naming those that did not, a number that two were given, or the
    variable and both values. Who comes after all have agreed hears of it in the end, alone.
    """
    host, _, port = coordinator.rpartition(":")
    if told.index == 0:
        problem = _hear_all(int(port), told, timeout)
    else:
        problem = _tell((host.strip("[]"), int(port)), told, timeout)
    if problem:
        raise ProcessError(problem)


def _hear_all(port: int, mine: Told, timeout: float) -> str:
    """What is wrong with the processes that came until `timeout`; all of them are told."""
    until, settled = time.monotonic() + timeout, math.inf
    problem, missing = "", set(range(1, mine.count))
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(port))
        except OSError as error:
            return (
                f"port {port} of the coordinator cannot be opened here ({error}): choose another, "
                f"unless another process here has number 0 too (by {mine.numbered_by})"
            )
        server.setblocking(False)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        peers: set[_Peer] = set()
        while (left := min(until, settled) - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None:
                    with contextlib.suppress(OSError):  # it has gone since
                        peer = _Peer(stack.enter_context(server.accept()[0]))
                        peer.connection.setblocking(False)
                        selector.register(peer.connection, selectors.EVENT_READ, peer)
                        peers.add(peer)
                elif not key.data.hear():
                    selector.unregister(key.data.connection)
                    key.data.connection.close()
                    peers.remove(key.data)
            others = [peer.told for peer in peers if peer.told]
            if not problem and (problem := _contradiction(others, mine)):
                until = min(until, time.monotonic() + LINGER)
            missing = set(range(1, mine.count)) - {other.index for other in others}
            settled = math.inf if missing else min(settled, time.monotonic() + SETTLE)
        if not problem and missing:
            problem = _absence(sorted(missing), mine.count, timeout)
        for peer in peers:
            with contextlib.suppress(OSError):  # it has gone since
                peer.connection.sendall(json.dumps(problem).encode() + b"\n")
    return problem


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _understood(line: bytes) -> Told | None:
    """The message of a process; None for whatever else comes to an open port."""
    try:
        told = Told(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    typed = [type(value) for value in vars(told).values()] == [int, int, str, str]
    return told if typed and 0 < told.index < told.count else None


def _contradiction(others: list[Told], mine: Told) -> str:
    for other in others:
        if other.count != mine.count:
            return (
                f"{other.counted_by}={other.count} in process {other.index}, but "
                f"{mine.counted_by}={mine.count} in process 0: give all processes of a run the "
                "same number"
            )
    for index, times in Counter(other.index for other in others).items():
        if times > 1:
            names = sorted({other.numbered_by for other in others if other.index == index})
            return (
                f"number {index} (by {' and '.join(names)}) was given to two processes: give each "
                "its own number"
            )
    return ""


def _absence(missing: list[int], count: int, timeout: float) -> str:
    names = ", ".join(map(str, missing[:NAMED])) + (", ..." if len(missing) > NAMED else "")
    return (
        f"process {names} of {count} did not come within {timeout:g} s, or left again: start all "
        "of them, each with its own number, with the same coordinator, whose port all hosts must "
        "reach"
    )


def _tell(address: tuple[str, int], told: Told, timeout: float) -> str:
    """What process 0 found wrong, or that it does not answer."""
    until, failure, begun = time.monotonic() + timeout, "", False
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, min(left, LINGER)) as connection:
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionError("nobody listens")  # TCP connected the socket to itself
                connection.sendall(json.dumps(vars(told)).encode() + b"\n")
                return _answer(connection, until + LINGER)  # process 0 started a little later
        except (OSError, ValueError, RecursionError) as error:  # not there yet, or not process 0
            failure, begun = str(error), isinstance(error, _Begun)
        time.sleep(RETRY)
    if begun:
        return (
            f"the run at {address[0]}:{address[1]} has begun without this process: number "
            f"{told.index} (by {told.numbered_by}) was given to another one too, or a former run "
            "has not ended; give each process its own number, or choose another port"
        )
    return (
        f"process 0 of {told.count} does not answer at {address[0]}:{address[1]} after "
        f"{timeout:g} s ({failure}): start all processes, with the same coordinator, whose port "
        "all hosts must reach"
    )


def _answer(connection: socket.socket, until: float) -> str:
    """The line that process 0 sends; OSError or ValueError if none comes, or another thing, _Begun
    if that is JAX's."""
    said = b""
    while b"\n" not in said and len(said) <= LONGEST:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        if not (part := connection.recv(LONGEST)):
            raise ConnectionError("it left without an answer")
        said += part
        if said[3:9] == SETTINGS:
            raise _Begun("the run has begun")
    answer = json.loads(said)
    if not isinstance(answer, str):
        raise ValueError(f"its answer is no answer of process 0: {said[:40]!r}")
    return answer
