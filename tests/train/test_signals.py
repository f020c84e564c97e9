"""The first signal prints one line and stops the run, the second exits, and neither prints a traceback."""

import os
import signal

import pytest

from remixer_t5x.cli import train
from remixer_t5x.train import preemption
from remixer_t5x.train.settings import TrainResult


class Exited(BaseException):
    """Raised instead of exiting the process."""


@pytest.fixture
def catch_exit(monkeypatch):
    def exit_process(code):
        raise Exited(code)

    monkeypatch.setattr(os, '_exit', exit_process)


@pytest.mark.parametrize(('number', 'again'), [(signal.SIGINT, 'press again'), (signal.SIGTERM, 'send it again')])
def test_the_first_signal_stops_the_run_and_the_second_exits(capfd, catch_exit, monkeypatch, number, again):
    with preemption.StopSignalHandler() as stop:
        assert stop.get_agreed_signal() is None
        stop.raise_if_stopping()
        signal.raise_signal(number)
        line = f'{number.name}: finishing this step or evaluation batch, then saving; {again} to quit without saving'
        assert capfd.readouterr().err.strip() == line
        assert stop.get_agreed_signal() == number.name
        with pytest.raises(preemption.EvaluationInterrupted):
            stop.raise_if_stopping()
        # A launcher may forward a signal that the run has also received directly.
        for repeated in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(repeated)
        monkeypatch.setattr(preemption, 'REPEAT_SECONDS', 0.0)
        # SIGHUP after another signal is ignored, because a closing terminal sends it twice.
        signal.raise_signal(signal.SIGHUP)
        assert stop.get_agreed_signal() == number.name
        with pytest.raises(Exited, match=str(128 + number)):
            signal.raise_signal(number)
        assert capfd.readouterr().err.strip() == 'exiting without saving'


def test_each_of_several_processes_returns_the_signal_that_it_received(monkeypatch, capfd):
    """JAX notifies the other processes of SIGTERM, which the process that receives Ctrl-C sends to itself."""
    killed = []
    monkeypatch.setattr(preemption.jax, 'process_count', lambda: 2)
    monkeypatch.setattr(preemption.multihost_utils, 'reached_preemption_sync_point', lambda call: call == 2)
    monkeypatch.setattr(preemption.os, 'kill', lambda process, number: killed.append(number))
    with preemption.StopSignalHandler() as stop:
        assert [stop.get_agreed_signal() for _ in range(3)] == [None, 'SIGTERM', 'SIGTERM']
        signal.raise_signal(signal.SIGINT)
        assert stop.get_agreed_signal() == 'SIGINT'
    assert killed == [signal.SIGTERM]


def test_sighup_stops_the_run_unless_it_is_ignored_as_under_nohup():
    # The test itself may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with preemption.StopSignalHandler() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.get_agreed_signal() == 'SIGHUP'
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with preemption.StopSignalHandler() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.get_agreed_signal() is None
    signal.signal(signal.SIGHUP, before)


def test_the_summary_omits_a_loss_that_is_not_finite_and_quotes_paths(capfd, tmp_path):
    """metrics.jsonl contains null instead of the loss."""
    folder = tmp_path / 'my run'
    (folder / 'tensorboard').mkdir(parents=True)
    result = TrainResult(3, None, {'loss': None}, {'loss': None, 'perplexity': None}, str(folder), 'checkpoint')
    train._print_summary(result)
    train._plot_loss(result, 'stop')
    output = capfd.readouterr().out
    assert output.startswith('finished at step 3\n') and f"(tensorboard --logdir '{folder}')" in output
