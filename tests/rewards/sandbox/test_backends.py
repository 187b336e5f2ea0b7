import json
import struct
import sys
from itertools import pairwise

import pytest

from agentrl.rewards.sandbox import Isolation, Limits, SandboxUnavailableError, backends
from agentrl.rewards.sandbox.backends import Bubblewrap, Container, Namespaces, find_backend, own_uid
from agentrl.rewards.sandbox.layout import Layout, machine_layout
from agentrl.rewards.sandbox.syscalls import ARCHITECTURES, EVERYWHERE, syscall_filter

LAYOUT = Layout(
    show=("/home/me/python", "/usr"), hide=("/usr/lib/packages",), links={"/lib": "usr/lib"}, python="/usr/bin/python3",
    code=("/usr/bin/python3", "-S"),
)  # fmt: skip
LIMITS = Limits(memory_mb=100, disk_mb=3, processes=5)


def pairs(argv):
    return list(pairwise(argv))


def test_bubblewrap_cuts_off_everything(monkeypatch):
    launch = Bubblewrap(LAYOUT, "/usr/bin/bwrap", as_root=False).launch(LIMITS)
    line = list(launch.command_line)
    options = line[: line.index("--")]
    for option in ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-user",
                   "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"):  # fmt: skip
        assert option in options
    assert ("--uid", "1000") in pairs(options)
    assert line[line.index("--") + 1 :][:4] == ["/usr/bin/python3", "-I", "-S", "-c"]
    assert not {"--bind", "--share-net", "--dev", "--setenv"} & set(options)
    assert dict(launch.environment) == {}
    assert (launch.uid, launch.count_processes) == (None, True)


def test_bubblewrap_shows_only_the_layout_and_nothing_writable_without_a_size():
    line = Bubblewrap(LAYOUT, "/usr/bin/bwrap", as_root=False).launch(LIMITS).command_line
    shown = [line[at + 1] for at, word in enumerate(line) if word == "--ro-bind"]
    assert shown == ["/home/me/python", "/usr"]
    for at, word in enumerate(line):
        if word == "--tmpfs":
            sized = line[at - 2 : at] == ("--size", str(3 << 20))
            assert sized or line[at + 2 : at + 4] == ("--remount-ro", line[at + 1])
    assert ("--remount-ro", "/") in pairs(line)
    # a closed home outside must not bar the way to what lies in it
    assert [line[at + 1] for at, word in enumerate(line) if word == "--dir"] == ["/dev", "/home", "/home/me"]


def test_as_root_bubblewrap_keeps_only_what_it_takes_to_become_another_user():
    launch = Bubblewrap(LAYOUT, "/usr/bin/bwrap", as_root=True).launch(LIMITS)
    options = pairs(launch.command_line)
    assert "--unshare-user" not in launch.command_line
    assert [value for option, value in options if option == "--cap-add"] == ["CAP_SETUID", "CAP_SETGID"]
    assert ("--cap-drop", "ALL") in options
    assert launch.uid


def test_the_plan_of_namespaces_has_the_layout_and_the_limits():
    launch = Namespaces(LAYOUT, as_root=False).launch(LIMITS)
    plan = json.loads(launch.command_line[5])
    assert plan["show"] == list(LAYOUT.show)
    assert (plan["disk_bytes"], plan["inodes"], plan["inner_uid"]) == (3 << 20, 768, 1000)
    assert not plan["privileged"]


@pytest.mark.parametrize("isolation", [Isolation.DOCKER, Isolation.PODMAN])
def test_a_container_has_no_network_no_privilege_and_every_limit(isolation, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "s3cr3t")
    launch = Container("/usr/bin/x", isolation, "image:1").launch(LIMITS)
    line = list(launch.command_line)
    image = line.index("image:1")
    options = line[:image]
    assert options[:2] == ["/usr/bin/x", "run"]
    for pair in (("--network", "none"), ("--ipc", "none"), ("--cap-drop", "ALL"), ("--user", "65534:65534"),
                 ("--security-opt", "no-new-privileges"), ("--memory", "100m"), ("--memory-swap", "100m"),
                 ("--pids-limit", "6"), ("--tmpfs", "/tmp:rw,nosuid,nodev,mode=1777,size=3m"), ("--pull", "never"),
                 ("--entrypoint", "python3")):  # fmt: skip
        assert pair in pairs(options)
    assert "--read-only" in options
    assert ("--read-only-tmpfs=false" in options) is (isolation is Isolation.PODMAN)
    assert not {"--volume", "-v", "--mount", "--env", "-e", "--privileged"} & set(options)
    assert line[image + 1 : image + 4] == ["-I", "-S", "-c"]
    assert "AGENTRL_TEST_SECRET" not in launch.environment
    assert (launch.lifeline, launch.count_processes, launch.uid) == (False, False, None)


def test_each_container_has_a_name_of_its_own():
    container = Container("docker", Isolation.DOCKER, "image")
    names = {container.launch(LIMITS).command_line[5] for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("agentrl-") for name in names)


async def test_ending_a_container_removes_it_by_name(tmp_path):
    log = tmp_path / "log"
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    program.chmod(0o755)
    launch = Container(str(program), Isolation.DOCKER, "image").launch(LIMITS)
    assert launch.end is not None
    await launch.end()
    assert log.read_text() == f"rm --force {launch.command_line[5]}\n"


@pytest.mark.parametrize("isolation", [Isolation.BUBBLEWRAP, Isolation.DOCKER, Isolation.PODMAN])
def test_a_program_that_is_not_installed_is_named(isolation, monkeypatch):
    monkeypatch.setattr(backends.shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailableError, match="is not installed"):
        find_backend(isolation, LAYOUT, "image")


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="need Linux"):
        find_backend(Isolation.NAMESPACES, LAYOUT, "image")


@pytest.mark.parametrize(
    ("mapped", "low", "high"),
    [((0, 4294967295), 1_900_000_000, 2_100_000_000), ((0, 65536), 61_440, 65_536), ((0, 2), 1, 2)],
)
def test_a_user_number_is_one_that_exists_and_is_not_root(monkeypatch, mapped, low, high):
    monkeypatch.setattr(backends, "mapped_uids", lambda: mapped)
    for _ in range(50):
        assert low <= own_uid() < high


def test_the_layout_shows_no_path_twice_and_no_packages():
    layout = machine_layout()
    assert not any(a != b and b.startswith(f"{a}/") for a in layout.show for b in layout.show)
    assert any(path.endswith("-packages") for path in layout.hide)
    assert "-S" in layout.code
    assert "-S" not in machine_layout(packages=True).code
    assert not {"/", "/etc", "/home", "/root", "/tmp", "/var", "/work"} & set(layout.show)


@pytest.mark.parametrize("path", ["/", "/tmp", "/no/such/path"])
def test_what_cannot_be_shown_is_an_error(path):
    with pytest.raises(ValueError, match="read_only"):
        machine_layout(read_only=[path])


def judge(program, architecture, number, argument=0):
    """Interpret a filter, as the kernel does."""
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            loaded = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_what_it_lists_and_allows_the_rest(machine):
    program = syscall_filter(machine)
    architecture, numbers = ARCHITECTURES[machine]
    allow, kill = 0x7FFF0000, 0x80000000
    for name, number in (numbers | EVERYWHERE).items():
        if name not in ("socket", "clone"):
            assert judge(program, architecture, number) & 0xFFFF0000 == 0x00050000, name
    assert judge(program, architecture, numbers["socket"], 1) == allow
    assert all(judge(program, architecture, numbers["socket"], family) != allow for family in (2, 10, 16, 17, 40))
    assert judge(program, architecture, numbers["clone"], 17) == allow
    assert judge(program, architecture, numbers["clone"], 0x10000000 | 17) != allow
    assert judge(program, architecture, 0) == allow
    assert judge(program, 0x40000003, 0) == kill


def test_a_machine_without_a_filter_is_refused():
    with pytest.raises(SandboxUnavailableError, match="riscv64"):
        syscall_filter("riscv64")
