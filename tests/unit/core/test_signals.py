import os
import signal
from collections.abc import Iterator

import pytest

from dflash_core import signals
from dflash_core.signals import StopRequested, StopSignals


@pytest.fixture
def installed() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignals()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_raises_outside_orderly_work(installed: StopSignals, number: int, code: int) -> None:
    with pytest.raises(StopRequested) as caught:
        send(number)
    assert caught.value.exit_code == code


def test_the_first_signal_asks_and_an_echo_of_it_is_ignored(installed: StopSignals) -> None:
    asked: list[int] = []
    with installed.orderly(asked.append):
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert asked == [signal.SIGTERM]


def test_who_insists_is_heard(installed: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with installed.orderly(asked.append):
        send(signal.SIGINT)
        monkeypatch.setattr(signals, "SAME_WISH_SECONDS", 0.0)
        with pytest.raises(StopRequested):
            send(signal.SIGINT)
    assert asked == [signal.SIGINT]
