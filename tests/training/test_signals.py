import os
import signal
import threading

import pytest

from rope_jax.training.signals import Interrupted, stop_signals


def test_a_second_signal_ends_the_process(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with stop_signals() as signals:
        signals.at_once = False
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        signal.raise_signal(signal.SIGTERM)
        assert ended == [143]
        with pytest.raises(Interrupted, match="SIGTERM"):
            signals()
    assert "once more to stop at once" in capfd.readouterr().err


def test_a_signal_ends_at_once_what_has_nothing_to_save():
    with pytest.raises(Interrupted, match="SIGUSR1") as caught, stop_signals():
        signal.raise_signal(signal.SIGUSR1)
    assert not caught.value.saved


def test_a_profile_is_asked_for_once():
    with stop_signals() as signals:
        signal.raise_signal(signal.SIGUSR2)
        assert signals.profile_wanted()
        assert not signals.profile_wanted()
        signals()


def test_handlers_are_those_of_before_and_threads_have_none():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    with stop_signals() as signals:
        assert [signal.getsignal(number) for number in numbers] == 4 * [signals.handle]
    assert [signal.getsignal(number) for number in numbers] == before
    seen = []

    def elsewhere():
        with stop_signals():
            seen.extend(signal.getsignal(number) for number in numbers)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == before
