"""Another user of the machine, who sees the sockets of a new process set: gets nothing, and holds nothing up."""

from __future__ import annotations

import os

import pytest

from fault_lab import run

# Each rank waits at its door until the stranger has found all of the set, so that strangers are there first.
SETS = """
import pathlib, subprocess
STRANGER = '''
import os, socket, sys, time
os.setresuid(65534, 65534, 65534)
links, seen = [], set()
print("ready", flush=True)
while True:
    with open("/proc/net/unix") as listed:
        names = {line.split()[-1] for line in listed if " @hvdlite-" in line}
    for name in names - seen:
        for junk in (b"", b"GET / HTTP/1.0\\\\r\\\\n" * 9, bytes(24), bytes(64), bytes(range(256)) * 64):
            for _ in range(20):
                link = socket.socket(socket.AF_UNIX)
                try:
                    link.connect("\\\\0" + name[1:])
                    link.sendall(junk)
                    link.setblocking(False)
                except OSError:
                    pass  # hung up on
                links.append(link)
        seen.add(name)
        print(name[1:], flush=True)
    answers = 0
    for link in links:
        try:
            answers += len(link.recv(1 << 16))
        except OSError:
            pass
    if answers:
        print("ANSWERED", answers, flush=True)
    time.sleep(0.001)
'''
directory = pathlib.Path(sys.argv[1])
hvdlite.init()
runtime = hvdlite.runtime()
stranger = None
if runtime.rank == 0:
    with open(directory / "seen", "wb") as seen:
        stranger = subprocess.Popen([sys.executable, "-c", STRANGER], stdout=seen)

def words():
    return (directory / "seen").read_text().split() if (directory / "seen").exists() else []

while not words():
    time.sleep(0.01)

def after_the_stranger(doors, rank, deadline_s):
    while not {door.name[1:] for door in doors.values()} <= set(words()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return connect(doors, rank, deadline_s)

hvdlite.node._connect_to_leader = after_the_stranger
try:
    for ranks in ([0, 1], [1, 2], [0, 2, 3], [1, 2, 3]):
        _, group = runtime.add_group(ranks)
        array = np.full(1000, 1 << runtime.rank, np.float32)
        view = TensorView.of_numpy(array)
        if group is not None:
            allreduce_async(group, [view], [view], name="in a set").wait()
            assert (array == sum(1 << rank for rank in ranks)).all()
    barrier_async(runtime.group).wait()
    say("answered" if "ANSWERED" in words() else "not answered", "at", len(words()) > 10, "doors")
    barrier_async(runtime.group).wait()
finally:
    if stranger is not None:
        stranger.kill()
        stranger.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_at_a_process_set(tmp_path: os.PathLike[str]) -> None:
    result = run(SETS, str(tmp_path), n=4).check()
    assert result.stdout == "not answered at True doors\n" * 4
