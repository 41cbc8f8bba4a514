"""Before JAX connects the processes of a run: are all there, and do all mean the same run?

JAX aborts a process whose companions do not come (exit code 134) and names none of them; processes
that were told different numbers of them fail or hang. So each first tells process 0 what it was
told, over TCP on the coordinator's port; process 0 answers all alike and leaves the port to JAX.
"""

import contextlib
import json
import socket
import time
from dataclasses import dataclass

from sage_jax.core.ending import ProcessError

LINGER = 5.0  # seconds in which process 0 still answers those that come after a contradiction
LONGEST = 4096  # bytes of a message
RETRY = 0.2  # seconds


@dataclass(frozen=True)
class Told:
    """What a process was told: its number, how many there are, and by which variable."""

    index: int
    count: int
    variable: str


def agree(coordinator: str, told: Told, timeout: float) -> None:
    """Returns when all processes have come and were told the same; to be called by each of them.

    coordinator: host:port of process 0. timeout: seconds to wait for the others. ProcessError, in
    every process that came, naming those that did not, or the variable and both values.
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
    until, problem, heard = time.monotonic() + timeout, "", set()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(port))
        except OSError as error:
            return f"port {port} of the coordinator cannot be opened here ({error}): choose another"
        connections = []
        while len(heard) < mine.count - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                break
            connection.settimeout(LINGER)
            if (other := _read(connection)) is None:
                continue  # whoever that was
            connections.append(connection)
            heard.add(other.index)
            if not problem and (problem := _contradiction(other, mine)):
                until = min(until, time.monotonic() + LINGER)
        if not problem and (missing := sorted(set(range(1, mine.count)) - heard)):
            problem = (
                f"process {', '.join(map(str, missing))} of {mine.count} did not come within "
                f"{timeout:g} s: start all of them, with the same coordinator, whose port all "
                "hosts must reach"
            )
        for connection in connections:
            with contextlib.suppress(OSError):  # it has gone since
                connection.sendall(json.dumps(problem).encode() + b"\n")
    return problem


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _read(connection: socket.socket) -> Told | None:
    try:
        with connection.makefile("rb") as lines:
            return Told(**json.loads(lines.readline(LONGEST)))
    except (OSError, ValueError, TypeError):
        return None


def _contradiction(other: Told, mine: Told) -> str:
    if other.count == mine.count:
        return ""
    return (
        f"{other.variable}={other.count} in process {other.index}, but {mine.variable}="
        f"{mine.count} in process 0: give all processes of a run the same number"
    )


def _tell(address: tuple[str, int], told: Told, timeout: float) -> str:
    """What process 0 found wrong, or that it does not answer."""
    until, failure = time.monotonic() + timeout, ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, left) as connection:
                connection.sendall(json.dumps(vars(told)).encode() + b"\n")
                connection.settimeout(timeout + LINGER)  # it may have started after this one
                with connection.makefile("rb") as lines:
                    return json.loads(lines.readline(LONGEST))
        except (OSError, ValueError) as error:  # not there yet, or gone before it answered
            failure = str(error)
        time.sleep(RETRY)
    return (
        f"process 0 of {told.count} does not answer at {address[0]}:{address[1]} after "
        f"{timeout:g} s ({failure}): start all processes, with the same coordinator, whose port "
        "all hosts must reach"
    )
