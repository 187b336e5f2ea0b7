"""Sets up namespaces without bubblewrap, and runs a command in them.

Guarantees: the command is process 1 of its PID namespace, with its own read-only root that has only the listed folders,
without network, and sees no process, mount or host name of the machine; if a step fails, the command does not run.

How: it runs outside as ``python -I -S -c <this file> <plan as JSON> command...``, with the standard library only, and
waits for the command. It needs Linux 5.12 for ``mount_setattr``, and either root or user namespaces.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any

NAMESPACES = {  # flags of unshare(2); without root NEW_USER is added
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
NEW_USER = 0x10000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
MNT_DETACH = 2
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # system call numbers, the same on every architecture
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
TREE_CLONE, TREE_CLOEXEC, MOVE_FROM_EMPTY_PATH = 1, os.O_CLOEXEC, 4
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG = 1
STAGING = "/tmp"  # the new root is built here, visible in our mount namespace only, before it becomes the root

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    """``struct mount_attr``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


def checked(result: int, what: str) -> int:
    """Return the result of a system call; raise ``OSError`` if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(kind: str | None, target: str, flags: int, options: str = "") -> None:
    """Mount a new file system, or change how mounts propagate."""
    name = kind.encode() if kind else None
    checked(libc.mount(name, target.encode(), name, ctypes.c_ulong(flags), options.encode()), f"mount {kind} {target}")


def set_attributes(folder: int, path: str, flags: int, attributes: int) -> None:
    """Add attributes to a mount; removes none."""
    wanted = MountAttributes(attributes, 0, 0, 0)
    result = libc.syscall(
        MOUNT_SETATTR, folder, path.encode(), flags, ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted))
    )
    checked(result, f"mount_setattr {path}")


def copy_tree(path: str, attributes: int) -> int:
    """Return a copy of the mounts at a path, not attached anywhere yet."""
    tree = libc.syscall(OPEN_TREE, AT_FDCWD, path.encode(), TREE_CLONE | TREE_CLOEXEC | AT_RECURSIVE)
    checked(tree, f"open_tree {path}")
    set_attributes(tree, "", AT_EMPTY_PATH | AT_RECURSIVE, attributes)
    return tree


def attach(tree: int, path: str, is_folder: bool) -> None:
    """Attach a copy under the new root."""
    target = STAGING + path
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    checked(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_FROM_EMPTY_PATH), f"move_mount {path}")
    os.close(tree)


def become_user(uid: int, gid: int, inner: int) -> None:
    """Map the user and group in a new user namespace to an id that is not root's."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(plan: dict[str, Any]) -> None:
    """Mount what the plan lists, and make it the root."""
    mount(None, "/", MS_REC | MS_PRIVATE)
    trees = [
        (path, os.path.isdir(path), copy_tree(path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)) for path in plan["show"]
    ]
    trees += [(path, False, copy_tree(path, ATTR_NOSUID)) for path in plan["devices"]]
    mount("tmpfs", STAGING, MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.umask(0o022)
    os.makedirs(STAGING + plan["disk"])
    size = plan["disk_bytes"]
    mount("tmpfs", STAGING + plan["disk"], MS_NOSUID | MS_NODEV, f"mode=1777,size={size},nr_inodes={plan['inodes']}")
    for path, is_folder, tree in trees:
        attach(tree, path, is_folder)
    for path, target in plan["links"].items():
        os.makedirs(os.path.dirname(STAGING + path), exist_ok=True)
        os.symlink(target, STAGING + path)
    for path in plan["hide"]:
        mount("tmpfs", STAGING + path, MS_NOSUID | MS_NODEV, "mode=755,size=4k,nr_inodes=2")
        set_attributes(AT_FDCWD, STAGING + path, 0, ATTR_RDONLY)
    os.makedirs(STAGING + "/proc")
    mount("proc", STAGING + "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    set_attributes(AT_FDCWD, STAGING, 0, ATTR_RDONLY)
    os.chdir(STAGING)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def main() -> int:
    """Run the command in new namespaces; return its exit code."""
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    uid, gid = os.getuid(), os.getgid()
    flags = sum(NAMESPACES.values()) | (0 if plan["privileged"] else NEW_USER)
    checked(libc.unshare(flags), "unshare")
    checked(libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)), "prctl")
    if not plan["privileged"]:
        become_user(uid, gid, plan["inner_uid"])
    child = os.fork()  # the first process of the new PID namespace
    if child:
        return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    checked(libc.sethostname(b"sandbox", ctypes.c_size_t(7)), "sethostname")
    build_root(plan)
    os.execve(command[0], command, {})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:  # reported outside as the reason why the sandbox is unavailable
        sys.exit(f"sandbox: {type(error).__name__}: {error}")
