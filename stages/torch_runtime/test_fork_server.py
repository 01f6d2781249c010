"""The fork server: a child for each message with its descriptors, and word of every end."""

import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent

SERVER = f"""
import os, signal, socket, sys
sys.path[:0] = [{str(HERE)!r}]
import fork_server

def work(message, descriptors):
    os.write(descriptors[0], b"child got " + message)
    if message == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 7

def ended(kept, code):
    os.write(kept[0], b" ended %d" % code)

control = socket.socket(fileno=0)
started = lambda descriptors: descriptors[1:]
fork_server.ForkServer(control, work, message_bytes=64, most_descriptors=2, started=started, ended=ended).serve()
"""


def ask(control, message):
    """What the child and the server write, until both have closed their ends."""
    readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
    socket.send_fds(control, [message], writers)
    for descriptor in writers:
        os.close(descriptor)
    texts = []
    for descriptor in readers:
        with os.fdopen(descriptor, "rb") as file:
            texts.append(file.read())
    return texts


def test_children_get_their_descriptors_and_their_ends_are_told():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=theirs)
    assert ask(ours, b"one") == [b"child got one", b" ended 7"]
    assert ask(ours, b"crash") == [b"child got crash", b" ended -11"]
    assert ask(ours, b"two") == [b"child got two", b" ended 7"]
    ours.close()
    assert process.wait(20) == 0


def test_what_the_first_child_can_do_without_is_done_before_the_second():
    """Not before the first: it would wait for it."""
    server = SERVER.replace('b"child got " + message', 'b"ready" if done else b"not yet"').replace(
        "ended=ended)", "ended=ended, after_first=lambda: done.append(1))"
    )
    server = "done = []\n" + server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", server], stdin=theirs)
    assert [ask(ours, b"x")[0] for _ in range(3)] == [b"not yet", b"ready", b"ready"]
    ours.close()
    assert process.wait(20) == 0


def test_variables_that_are_set_stay():
    sys.path[:0] = [str(HERE)]
    import fork_server

    environment = {"OMP_NUM_THREADS": "4"}
    fork_server.prepare_environment(environment, threads="2")
    assert environment["OMP_NUM_THREADS"] == "4" and environment["MKL_NUM_THREADS"] == "2"
