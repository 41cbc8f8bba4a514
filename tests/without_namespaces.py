"""Run a command where no namespace can be made, as in a container without the right to:
``python tests/without_namespaces.py COMMAND ...``. The filter is inherited by all below.
"""

import ctypes
import os
import struct
import sys

UNSHARE, CLONE = {"x86_64": (272, 56), "aarch64": (97, 220)}[os.uname().machine]
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW flag but the one of time, which only unshare takes
LOAD, JEQ, JSET, RET = 0x20, 0x15, 0x45, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001
PROGRAM = (
    (LOAD, 0, 0, 0),
    (JEQ, 4, 0, UNSHARE),
    (JEQ, 0, 2, CLONE),
    (LOAD, 0, 0, 16),
    (JSET, 1, 0, NEW_NAMESPACES),
    (RET, 0, 0, ALLOW),
    (RET, 0, 0, EPERM),
)


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("<HBBI", *line) for line in PROGRAM)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(PROGRAM), ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
    if libc.unshare(0x10000000) == 0:
        sys.exit("unshare still works")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
