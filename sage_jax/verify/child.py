"""A worker process at the other end of a socket: started by exec, killed as a group."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE = 64 << 20
SEND_TIMEOUT = 10.0
CLOCK = os.sysconf("SC_CLK_TCK")


class ChildDied(Exception):
    """The worker closed its socket or broke the framing."""


class Child:
    """One process with a socket of length-framed JSON. Never a fork of this interpreter."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """Start ``python ... arguments`` with the number of its socket put for "{socket}"."""
        self._errors = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        number = str(theirs.fileno())
        command = [sys.executable] + [a.replace("{socket}", number) for a in arguments]
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._socket = ours
        self._socket.setblocking(False)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Raises ChildDied when the worker does not take it."""
        text = json.dumps(message).encode()
        frame = struct.pack(">I", len(text)) + text
        self._socket.settimeout(SEND_TIMEOUT)
        try:
            sent = socket.send_fds(self._socket, [frame], list(descriptors))
            if sent < len(frame):  # even sending nothing fails once the worker is gone
                self._socket.sendall(frame[sent:])
        except OSError as error:
            raise ChildDied(str(error)) from error
        finally:
            self._socket.setblocking(False)

    def receive(self) -> list[Any]:
        """Complete messages that have arrived; never blocks. Raises ChildDied at the end."""
        messages = []
        while True:
            try:
                part = self._socket.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError as error:
                end = str(error)
                part = b""
            else:
                end = "closed"
            if not part:
                if messages:  # what it said before its end counts; the end shows again
                    break
                raise ChildDied(end)
            self._buffer += part
            while len(self._buffer) >= 4:
                (size,) = struct.unpack(">I", self._buffer[:4])
                if size > MAX_MESSAGE:
                    raise ChildDied("oversized message")
                if len(self._buffer) < 4 + size:
                    break
                text = bytes(self._buffer[4 : 4 + size])
                del self._buffer[: 4 + size]
                try:
                    messages.append(json.loads(text))
                except (ValueError, RecursionError) as error:
                    raise ChildDied("broken message") from error
        return messages

    def cpu_seconds(self) -> float:
        """CPU time the process has used so far, 0 when it is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as handle:
                fields = handle.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / CLOCK

    def last_words(self) -> str:
        """The end of what the worker wrote on stderr, for a message about its death."""
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 2000, max(0, size - 2000))
        return text.decode("utf-8", "replace")

    def kill(self) -> None:
        """End the process and its group, and wait for it: no zombie stays."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._socket.close()
            self._errors.close()


def environment(hash_seed: int = 0) -> dict[str, str]:
    """All a worker is told about the machine: nothing of the trainer's own environment."""
    return {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": str(hash_seed),
        "OPENBLAS_NUM_THREADS": "1",
    }
