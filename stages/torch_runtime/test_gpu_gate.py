"""The gate of one GPU: many compute, one takes times, and nobody waits for ever."""

import fcntl
import os
import threading
import time

import pytest

from gpu_gate import Gate


def nothing():
    """A worker that has no reason to stop waiting."""


def test_a_clock_is_alone_and_nobody_starves():
    gate, inside, faults = Gate(enough=2, most=3), [], []

    def work(number):
        kind = "alone" if number % 3 == 0 else "shared"
        for _ in range(30):
            gate.enter(kind, nothing)
            inside.append(kind)
            if ("alone" in inside and len(inside) > 1) or len(inside) > 3:
                faults.append(list(inside))
            time.sleep(0.0005)
            inside.remove(kind)
            gate.leave(kind)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults and not inside and not any(thread.is_alive() for thread in threads)


def test_who_pauses_lets_a_clock_pass_and_keeps_the_place():
    gate, order = Gate(enough=1, most=1), []
    gate.enter("shared", nothing)

    def clock():
        gate.enter("alone", nothing)
        order.append("clock")
        gate.leave("alone")

    def newcomer():
        gate.enter("shared", nothing)
        order.append("newcomer")
        gate.leave("shared")

    threads = [threading.Thread(target=clock), threading.Thread(target=newcomer)]
    threads[0].start()
    while not gate._closed:
        time.sleep(0.001)
    threads[1].start()
    gate.pause(nothing)
    order.append("paused one goes on")
    # Only one may share, and it is still here.
    time.sleep(0.05)
    assert order == ["clock", "paused one goes on"]
    gate.leave("shared")
    for thread in threads:
        thread.join(10)
    assert order == ["clock", "paused one goes on", "newcomer"]


def test_without_a_clock_a_pause_is_nothing():
    gate = Gate()
    gate.enter("shared", nothing)
    gate.pause(lambda: pytest.fail("it waited"))
    gate.leave("shared")


class Gone(Exception):
    """The worker has ended."""


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_a_worker_that_ends_while_it_waits_leaves_nothing_behind(kind):
    gate = Gate(enough=1)
    gate.enter("alone", nothing)

    def ended():
        raise Gone

    with pytest.raises(Gone):
        gate.enter(kind, ended)
    gate.leave("alone")
    gate.enter("shared", nothing)
    gate.leave("shared")


def test_clocks_of_other_programs_are_waited_for(tmp_path):
    path = tmp_path / "clock"
    gate, entered = Gate(path=str(path)), threading.Event()
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    thread = threading.Thread(target=lambda: (gate.enter("alone", nothing), entered.set(), gate.leave("alone")))
    thread.start()
    assert not entered.wait(0.2)
    os.close(other)
    assert entered.wait(10)
    thread.join()


def test_the_time_is_accounted_for():
    seconds = [0.0]
    gate = Gate(now=lambda: seconds[0])

    def passes(time):
        seconds[0] += time

    passes(1)
    gate.enter("shared", nothing)
    passes(4)
    gate.leave("shared")
    passes(1)
    gate.enter("alone", nothing)
    passes(2)
    gate.leave("alone")
    assert gate.shares() == {"shared": 0.5, "alone": 0.25, "idle": 0.25}
