import signal
import subprocess
import sys
import time
from concurrent import futures

import jax
import pytest

from rope_jax.training import signals
from rope_jax.training.signals import Interrupted, stop_signals

_BLOCKED = """
import ctypes
from rope_jax.training.signals import stop_signals

with stop_signals() as signals:
    signals.at_once = False
    print("ready", flush=True)
    lock = ctypes.create_string_buffer(128)
    for _ in range(2):  # a lock that is taken twice; signals do not interrupt it
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.process
def test_the_second_signal_ends_a_blocked_main_thread():
    """Simulates a collective operation that another process never joins; SIGHUP does not end it."""
    with subprocess.Popen([sys.executable, "-c", _BLOCKED], stdout=subprocess.PIPE) as blocked:
        blocked.stdout.readline()
        try:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGUSR2):
                time.sleep(0.3)
                blocked.send_signal(number)
            time.sleep(0.5)
            assert blocked.poll() is None
            blocked.send_signal(signal.SIGTERM)
            assert blocked.wait(20) == 143
        finally:
            blocked.kill()


def test_a_closed_terminal_stops_the_run_once():
    before = signal.getsignal(signal.SIGHUP)
    with stop_signals() as stopping:
        stopping.at_once = False
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Interrupted, match="SIGHUP"):
            stopping()
    signal.raise_signal(signal.SIGHUP)  # one more, while the process ends
    signal.signal(signal.SIGHUP, before)


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals() as stopping:
        signal.raise_signal(signal.SIGHUP)
        stopping()
    signal.signal(signal.SIGHUP, before)


def test_signals_end_endless_waits(monkeypatch):
    with stop_signals() as stopping:
        stopping.at_once = False
        stopping.waiting(1)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            stopping.waiting(2)
        assert not caught.value.alone
        monkeypatch.setattr(jax, "process_count", lambda: 2)  # which cannot save together
        stopping.waiting(30)  # the signal has only just come
        now = time.monotonic()
        monkeypatch.setattr(signals.time, "monotonic", lambda: now + 30)
        stopping.waiting(1)  # the last step was long, and the batch may come with the next second
        with pytest.raises(Interrupted) as caught:
            stopping.waiting(11)
        assert caught.value.alone


def test_a_profile_is_requested_once():
    with stop_signals() as stopping:
        signal.raise_signal(signal.SIGUSR2)
        assert stopping.take_profile_request()
        assert not stopping.take_profile_request()
        stopping()


def test_handlers_are_restored_and_absent_in_threads():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    handlers = lambda: [signal.getsignal(number) for number in numbers]

    def during():
        with stop_signals():
            return handlers()

    before, within = handlers(), during()
    assert handlers() == before
    assert not set(before) & set(within)
    with futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(during).result() == before
