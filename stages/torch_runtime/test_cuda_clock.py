"""Which spins are tried, with a GPU that is made up: its kernels take 3 ms and run when the spin is over."""

import pytest

from cuda_clock import LONGEST_SPIN, TRIES, CudaClock, Launches

KERNELS = 3e-3


class MadeUp(CudaClock):
    """`launching` seconds of launches for each call; `waits` is one that reads a result back."""

    def __init__(self, launching, waits=False):
        self.launching, self.waits, self.spins = iter(launching), waits, []

    def _once(self, call, spin):
        self.spins.append(spin)
        busy = next(self.launching)
        launched = max(spin, busy) + KERNELS if self.waits else busy
        return KERNELS * 1e3, launched < spin, launched


def test_launches_behind_the_spin_take_one_try():
    clock, launches = MadeUp([1e-3, 1e-3]), Launches(2e-3)
    assert clock.milliseconds(None, launches) == (3.0, True)
    assert launches == Launches(1e-3)
    clock.milliseconds(None, launches)
    assert clock.spins == [pytest.approx(3.1e-3), pytest.approx(1.6e-3)], "the next spin is as long as these launches"


def test_launches_that_showed_are_tried_with_a_longer_spin():
    clock, launches = MadeUp([20e-3, 20e-3, 20e-3]), Launches(1e-3)
    assert clock.milliseconds(None, launches) == (3.0, True)
    assert clock.spins[1] == pytest.approx(30.1e-3) and launches.seconds == pytest.approx(20e-3)


def test_a_call_that_waits_for_the_gpu_costs_little():
    clock, launches = MadeUp([1e-3] * 20, waits=True), Launches(4e-3)
    assert clock.milliseconds(None, launches) == (3.0, False)
    for _ in range(10):
        assert clock.milliseconds(None, launches) == (3.0, False)
    assert len(clock.spins) == TRIES + 10 and launches.show
    assert clock.spins[TRIES:] == [clock.spins[0]] * 10, "all at the first spin: times that can be compared"
    assert sum(clock.spins) < LONGEST_SPIN


def test_one_that_was_late_only_once_is_hidden_again():
    clock, launches = MadeUp([9e-3, 90e-3, 900e-3, 1e-3, 1e-3]), Launches(1e-3)
    assert clock.milliseconds(None, launches)[1] is False and launches.show
    assert clock.milliseconds(None, launches)[1] is True and not launches.show
