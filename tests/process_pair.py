"""Two processes of four fake CPU devices each that form one run over loopback."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port():
    """A port below those that the system gives to outgoing connections, so that none of this busy
    machine's takes it before it is used."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


class Pair:
    """`python *args` twice, told apart by PROCESS_ID; a context manager that leaves none behind.

    counts: what each is told to be the number of processes."""

    def __init__(self, folder, *args, counts=(2, 2)):
        folder.mkdir(parents=True, exist_ok=True)
        address = f"127.0.0.1:{free_port()}"
        env = os.environ | {
            "COORDINATOR_ADDRESS": address,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            # Programs run for moments here, and each process compiles them anew.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        }
        self._logs = [folder / f"log{i}" for i in range(2)]
        self.processes = []
        for i, log in enumerate(self._logs):
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", *map(str, args)],
                        env=env | {"PROCESS_ID": str(i), "NUM_PROCESSES": str(counts[i])},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                    )
                )

    def log(self, i):
        return self._logs[i].read_text()

    def wait(self, seconds):
        """Exit codes of both, which end within `seconds`."""
        try:
            return [process.wait(seconds) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            shown = "\n".join(f"--- process {i}\n{self.log(i)[-3000:]}" for i in range(2))
            raise AssertionError(f"still running after {seconds} s\n{shown}") from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
