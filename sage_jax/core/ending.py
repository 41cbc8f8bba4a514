"""How the processes of one run end: together, or soon after the first of them that fails.

A process that waits in a collective for one that is gone waits for ever. Who fails and can still
speak tells the others through the coordination service of `jax.distributed`, and each has a thread
that listens. Who is killed, or loses its machine, stops sending heartbeats, after which the service
itself ends the others (exit 134, `HEARTBEAT_TIMEOUT` in core/distributed.py).
"""

import atexit
import json
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

KEY = "sage_jax/failed"
LISTEN = 1.0  # seconds between two looks
PATIENCE = 5.0  # seconds given to the others to reach the same end


class ProcessError(ValueError):
    """The processes cannot form one run; the message says why, and what to change."""


class Peers:
    """The other processes of this run, and what is known of their end.

    client: of the coordination service. index: number of this process.
    """

    def __init__(self, client: Any, index: int):
        self._client, self._index = client, index
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="peers")
        self._listener.start()

    def close(self) -> None:
        """Listen no longer: the client is about to be shut down."""
        self._over.set()
        self._listener.join()

    def met_at_end(self) -> bool:
        """True when all processes have come to the same end within PATIENCE."""
        try:
            self._client.wait_at_barrier(f"{KEY}/end", int(PATIENCE * 1000))
        except RuntimeError:  # the deadline has passed, or the service is gone
            return False
        return True

    def tell(self, code: int, why: str) -> None:
        """Let the others know that this process has failed; the first to fail is heard."""
        failure = json.dumps({"process": self._index, "code": code, "why": why})
        try:
            self._client.key_value_set(KEY, failure)
        except RuntimeError:  # another has failed before, or the service is gone
            return
        self._linger()

    def _listen(self) -> None:
        while not self._over.wait(LISTEN):
            try:
                failure = json.loads(self._client.key_value_try_get(KEY))
            except RuntimeError:  # nobody has failed
                continue
            if failure["process"] != self._index:
                why = f"process {failure['process']} of this run has failed: {failure['why']}"
                print(f"sage_jax: {why}; this process ends as well", file=sys.stderr, flush=True)
                self._linger()
                end_now(failure["code"])

    def _linger(self) -> None:
        """The service is process 0's: without it the others are aborted before they have heard."""
        if self._index == 0:
            self._over.wait(3 * LISTEN)


_peers: Peers | None = None


def watch(client: Any, index: int) -> None:
    """From now on a failure of one process ends all."""
    global _peers
    _peers = Peers(client, index)
    atexit.register(_peers.close)  # before the end that JAX has registered
    sys.excepthook = _fail


def leave(code: int, why: str = "") -> int:
    """`code`, when all processes end or this one is alone. One that fails alone is ended here,
    without the end of JAX, which would wait for the others; they are told, and end too."""
    if code and _peers is not None and not _peers.met_at_end():
        _peers.tell(code, why or f"exit code {code}, see its log")
        end_now(code)
    return code


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace)
    leave(1, f"{kind.__name__}: {error}".splitlines()[0])


def end_now(code: int) -> None:
    """End this process without the end of JAX, which would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
