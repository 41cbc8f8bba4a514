"""Kernel primitives of the sandbox, through ctypes: limits, users, namespaces, Landlock.

Each function does one thing to the calling process and raises OSError when the kernel refuses;
which of them are used is decided by the zygote, which tries them first.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
_libc_fork = ctypes.PyDLL(None, use_errno=True).fork  # holds the interpreter lock throughout

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
PR_SET_KEEPCAPS, CAP_DAC_READ_SEARCH = 8, 1 << 2
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MS_NOATIME, MS_NODIRATIME, MS_RELATIME, ST_RELATIME = 1024, 2048, 1 << 21, 4096
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
MACHINE = os.uname().machine

SCRATCH_BYTES, SCRATCH_FILES = 16 << 20, 1000


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork() -> int:
    """fork(2) past the interpreter: its repairs after a fork are for processes with threads, and
    cost more page copies than most programs. The caller has one thread.
    """
    return check(_libc_fork(), "fork")


def death_signal(number: int) -> None:
    """Ask for a signal when the thread that made this process ends."""
    check(libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "pdeathsig")


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the creating thread ends; leave at once if it already has."""
    death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_common_limits(file_size: int) -> None:
    """Those a slot may have as well: bytes of a file, no core, nothing locked, no queues."""
    limit(resource.RLIMIT_FSIZE, file_size, file_size)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        limit(kind, 0, 0)


def set_limits(cpu: int, memory: int, files: int, tasks: int | None) -> None:
    """CPU seconds (soft; one more is hard), address space in bytes, open files, tasks."""
    limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    limit(resource.RLIMIT_AS, memory, memory)
    limit(resource.RLIMIT_NOFILE, files, files)
    if tasks is not None:
        limit(resource.RLIMIT_NPROC, tasks, tasks)


def limit(kind: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(kind, (soft, hard))
    except (ValueError, OSError):  # a hard limit that is lower already
        ceiling = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (min(soft, ceiling), min(hard, ceiling)))


def drop_user(uid: int, keep_reading: bool = False) -> None:
    """Become a user nobody uses; with ``keep_reading`` one that may read any file (which is for
    Landlock to bound), because the interpreter lies in a closed home.
    """
    if keep_reading:
        check(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keepcaps")
    if os.getgroups():
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep_reading:
        set_capabilities(CAP_DAC_READ_SEARCH)


def drop_capabilities() -> None:
    """Empty every capability set of this thread, the bounding set included where allowed."""
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    set_capabilities(0)


def set_capabilities(mask: int) -> None:
    header = struct.pack("<Ii", 0x20080522, 0)
    check(libc.capset(header, struct.pack("<6I", mask, mask, 0, 0, 0, 0)), "capset")


def no_new_privileges() -> None:
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def dumpable(yes: bool) -> None:
    """Whether others of the same user may look into this process."""
    check(libc.prctl(PR_SET_DUMPABLE, int(yes), 0, 0, 0), "dumpable")


# --- namespaces and the private root ------------------------------------------------------


def unshare(user: bool) -> None:
    """New mount, network, ipc, uts and pid namespaces; with ``user`` inside a user namespace.

    The pid namespace holds the next child, not the caller.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    check(libc.unshare(flags | (CLONE_NEWUSER if user else 0)), "unshare")
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as handle:
                handle.write(text)
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    def text(value: str | None) -> bytes | None:
        return value.encode() if value else None

    code = libc.mount(
        text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data or None)
    )
    check(code, f"mount {target}")


def readable_roots() -> list[str]:
    """Folders an interpreter needs to read: its own prefix and the system libraries."""
    wanted = [sys.base_prefix, sys.base_exec_prefix, "/usr", "/lib", "/lib64"]
    with open("/proc/self/maps") as handle:
        for line in handle:
            name = line.rstrip().split(maxsplit=5)[5:]
            if name and name[0].startswith("/") and ".so" in name[0]:
                wanted.append(os.path.dirname(name[0]))
    roots: list[str] = []
    for path in sorted(map(os.path.normpath, wanted)):
        inside = any(path == root or path.startswith(root + "/") for root in roots)
        if path != "/" and os.path.isdir(path) and not inside:
            roots.append(path)
    return roots


def bind(source: str, target: str, extra: int) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    # Flags of the source are locked inside a user namespace, so they are repeated.
    seen = os.statvfs(target).f_flag
    kept = seen & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    relative = MS_RELATIME if seen & ST_RELATIME else 0
    mount(None, target, None, MS_BIND | MS_REMOUNT | kept | relative | extra)


def enter_private_root(base: str, roots: list[str]) -> None:
    """Replace / by a tmpfs with read-only binds of ``roots``, three devices and a scratch /w."""
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=400,mode=755")
    for path in roots:
        target = base + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        bind(path, target, MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.mkdir(base + "/dev")
    for name in ("null", "zero", "urandom"):
        open(f"{base}/dev/{name}", "w").close()
        bind(f"/dev/{name}", f"{base}/dev/{name}", MS_NOSUID)
    os.mkdir(base + "/w")
    os.chdir(base)
    check(libc.syscall(SYS_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "detach the old root")
    os.chdir("/")
    mount(None, "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    mount_scratch("/w", first=True)


def mount_scratch(path: str, first: bool = False) -> None:
    """A fresh empty scratch tmpfs at ``path``, 16 MB and 1,000 files."""
    if not first:
        check(libc.umount2(path.encode(), MNT_DETACH), "umount scratch")
    options = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=1777"
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)


# --- Landlock -----------------------------------------------------------------------------

READ_FILE, READ_DIR, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
# Scratch: everything but making devices, sockets and fifos, and device ioctls.
SCRATCH_RIGHTS = 0x7FFF & ~((1 << 6) | (1 << 9) | (1 << 10) | (1 << 11))
RIGHTS_BY_ABI = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}


def landlock_abi() -> int:
    """The kernel's Landlock version, 0 when it has none."""
    return max(0, libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def landlock_rules(abi: int, readable: list[str], scratch: str | None, devices: list[str]) -> int:
    """A descriptor of the rules that allow only reads below ``readable`` and all of ``scratch``,
    and no TCP. Made once, entered by many.
    """
    handled = RIGHTS_BY_ABI.get(abi, 0xFFFF)
    attributes = struct.pack("<Q", handled)
    if abi >= 4:
        attributes += struct.pack("<Q", 3)  # bind and connect
    if abi >= 6:
        attributes += struct.pack("<Q", 3)  # abstract sockets and signals
    ruleset = check(
        libc.syscall(
            LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
        ),
        "landlock ruleset",
    )
    try:
        for path in readable:
            _allow(ruleset, path, (READ_FILE | READ_DIR) & handled)
        for path in devices:
            _allow(ruleset, path, (READ_FILE | WRITE_FILE) & handled)
        if scratch is not None:
            _allow(ruleset, scratch, SCRATCH_RIGHTS & handled)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def landlock_enter(ruleset: int) -> None:
    """Leave this process only what the rules allow."""
    check(libc.syscall(LANDLOCK_RESTRICT, ruleset, ctypes.c_uint(0)), "landlock restrict")


def _allow(ruleset: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("<Qi", rights, handle)
        code = libc.syscall(LANDLOCK_ADD, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0))
        check(code, f"landlock rule for {path}")
    finally:
        os.close(handle)
