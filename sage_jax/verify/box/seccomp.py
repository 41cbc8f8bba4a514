"""A seccomp allow-list, assembled by hand as classic BPF for x86-64 and aarch64.

Everything not listed fails with EPERM. There is no way to make a process, to run a program, to
open a network socket or to signal anybody, so nothing has to be cleaned up behind a program.
"""

import ctypes
import os
import struct

# name: (x86-64, aarch64); None = the architecture has no such call.
SIMPLE = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70),
    "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62), "fstat": (5, 80),
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "open": (2, None), "openat": (257, 56), "creat": (85, None),
    "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82),
    "fdatasync": (75, 83), "utimensat": (280, 88), "umask": (95, 166), "getdents": (78, None),
    "getdents64": (217, 61), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "eventfd": (284, None), "eventfd2": (290, 19),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    "flock": (73, 32), "fadvise64": (221, 223), "copy_file_range": (326, 285),
    "sendfile": (40, 71), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226),
    "mremap": (25, 216), "madvise": (28, 233), "msync": (26, 227), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "pause": (34, None), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "getpid": (39, 172), "gettid": (186, 178),
    "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getpriority": (140, 141), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getcpu": (309, 168), "getrandom": (318, 278),
    "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "set_tid_address": (218, 96), "arch_prctl": (158, None), "rseq": (334, 293),
    "membarrier": (324, 283), "restart_syscall": (219, 128), "exit": (60, 93),
    "exit_group": (231, 94), "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockopt": (55, 209), "setsockopt": (54, 208), "getsockname": (51, 204),
    "getpeername": (52, 205), "wait4": (61, 260), "waitid": (247, 95),
}  # fmt: skip
# name: (x86-64, aarch64, argument index, allowed values of its low 32 bits).
BY_ARGUMENT = {
    "prctl": (157, 167, 0, (15, 16, 0x53564D41)),  # SET_NAME, GET_NAME, SET_VMA
    "prlimit64": (302, 261, 0, (0,)),  # only on itself
    "ioctl": (16, 29, 1, (0x5401, 0x5421, 0x5450, 0x5451)),  # TCGETS FIONBIO FIONCLEX FIOCLEX
    # No F_SETOWN or F_SETSIG: with them a descriptor can be made to signal another process.
    "fcntl": (72, 25, 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)),
    "socketpair": (53, 199, 0, (1,)),  # AF_UNIX
}
CLONE, CLONE3, SENDTO = (56, 220), (435, 435), (44, 206)
CLONE_THREAD = 0x10000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
LOAD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def program(machine: str) -> bytes:
    """The filter for one architecture as packed ``struct sock_filter`` entries.

    Raises ValueError for an architecture without a table.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"no system call table for {machine!r}: x86_64 and aarch64 only")
    column, audit = ARCHITECTURES[machine]
    code: list[tuple[int, int, int, int]] = []

    def emit(op: int, k: int, true: int = 0, false: int = 0) -> None:
        code.append((op, true, false, k))

    def block(number: int, body: list[tuple[int, int, int, int]]) -> None:
        emit(JEQ, number, 0, len(body))
        code.extend(body)

    def ret(value: int) -> tuple[int, int, int, int]:
        return (RET, 0, 0, value)

    emit(LOAD, ARCH)
    emit(JEQ, audit, 1, 0)
    code.append(ret(KILL))
    emit(LOAD, NUMBER)
    if machine == "x86_64":  # the x32 table shares the architecture mark
        emit(JGE, 0x40000000, 0, 1)
        code.append(ret(ERRNO | ENOSYS))
    for numbers in SIMPLE.values():
        if numbers[column] is not None:
            block(numbers[column], [ret(ALLOW)])
    for x86, arm, index, values in BY_ARGUMENT.values():
        body = [(LOAD, 0, 0, ARGUMENTS + 8 * index)]
        for value in values:
            body += [(JEQ, 0, 1, value), ret(ALLOW)]
        block((x86, arm)[column], body + [ret(ERRNO | EPERM)])
    block(
        CLONE[column],
        [(LOAD, 0, 0, ARGUMENTS), (JSET, 0, 1, CLONE_THREAD), ret(ALLOW), ret(ERRNO | EPERM)],
    )
    block(CLONE3[column], [ret(ERRNO | ENOSYS)])  # glibc then falls back to clone
    # sendto without an address only: a datagram pair could otherwise reach any abstract socket.
    address = ARGUMENTS + 8 * 4
    block(
        SENDTO[column],
        [
            (LOAD, 0, 0, address),
            (JEQ, 0, 3, 0),
            (LOAD, 0, 0, address + 4),
            (JEQ, 0, 1, 0),
            ret(ALLOW),
            ret(ERRNO | EPERM),
        ],
    )
    code.append(ret(ERRNO | EPERM))
    return b"".join(struct.pack("<HBBI", *line) for line in code)


class Filter:
    """The filter of this machine, built once and installed after a fork."""

    def __init__(self) -> None:
        text = program(os.uname().machine)
        self._code = ctypes.create_string_buffer(text, len(text))
        # struct sock_fprog: count, padding, pointer
        self._fprog = ctypes.create_string_buffer(
            struct.pack("<HxxxxxxQ", len(text) // 8, ctypes.addressof(self._code)), 16
        )

    def install(self, libc: ctypes.CDLL) -> None:
        """Lock this process. Needs NO_NEW_PRIVS; OSError if the kernel refuses."""
        if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._fprog, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel refused the seccomp filter")
