"""What the line says, on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from remixer_t5x.train import progress

TIMING = {'seconds_per_step': 0.5, 'tokens_per_second': 12345.6}


def test_a_log_gets_plain_lines():
    out = io.StringIO()
    line = progress.ProgressLine(1000, console=Console(file=out, highlight=False, soft_wrap=True, width=20))
    for step in range(1, 301):
        line.update(step)
    line.log(300, {'loss': 4.8123, 'learning_rate': 0.0123}, {**TIMING, 'mfu': 0.413})
    line.close()
    assert out.getvalue() == 'step 300/1000 · loss 4.8123 · rate 0.012 · 12,346 tokens/s · MFU 41% · 5m50s left\n'


def test_a_terminal_gets_one_line_that_redraws():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, highlight=False)
    line = progress.ProgressLine(10, console=console)
    line.log(1, {'loss': 4.0}, TIMING)
    line.log(2, {'loss': 3.0}, TIMING)
    line.say('held-out loss 3.5')
    line.close()
    text = out.getvalue()
    assert '\x1b[' in text and 'held-out loss 3.5' in text and 'step 2/10 · loss 3.0000' in text
    assert text.count('\n') < 5


def test_quiet_prints_nothing(capsys):
    line = progress.ProgressLine(10, quiet=True)
    line.log(1, {'loss': 4.0}, TIMING)
    line.say('hello')
    line.close()
    assert capsys.readouterr() == ('', '')


def test_the_last_step_has_no_time_left_and_a_step_without_time_no_speed():
    assert progress.describe(5, 5, {'loss': 1.0}, TIMING) == 'step 5/5 · loss 1.0000 · 12,346 tokens/s'
    assert progress.describe(1, 5, {'loss': 1.0}, {}) == 'step 1/5 · loss 1.0000'


@pytest.mark.parametrize(
    ('kind', 'peak'),
    [
        ('NVIDIA H200', 989e12),
        ('NVIDIA A100-SXM4-80GB', 312e12),
        ('NVIDIA H100 80GB HBM3', 989e12),
        ('NVIDIA H100 PCIe', 756e12),
        ('TPU v4', 275e12),
        ('TPU v5 lite', 197e12),
        ('TPU v5p', 459e12),
        ('TPU v3', 61.5e12),
        ('cpu', None),
        ('NVIDIA GeForce RTX 3090', None),
    ],
)
def test_peaks(kind, peak):
    assert progress.peak_flops(kind) == peak


@pytest.mark.parametrize(
    ('seconds', 'text'), [(0.4, '0s'), (59, '59s'), (200, '3m20s'), (7500, '2h05m'), (273600, '3d04h')]
)
def test_durations(seconds, text):
    assert progress.duration(seconds) == text


def test_the_clock_leaves_out_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, 'perf_counter', lambda: now[0])
    clock = progress.Clock(progress.Work(tokens=100, flops=50.0, peak=1000.0, devices=2), step=10)
    now[0] = 7.0
    clock.pause(3.0)
    clock.wait(0.5)
    clock.wait(1.0)
    lap = clock.lap(12)
    assert lap.pop('host_mib') > 10
    speed = {'tokens_per_second': 50.0, 'tokens_per_second_per_device': 25.0}
    assert lap == {'seconds_per_step': 2.0, **speed, 'mfu': 0.025, 'data_wait_seconds': 1.5}
    assert clock.lap(12) == {}
    now[0] = 8.0
    assert (last := clock.lap(13))['seconds_per_step'] == 1.0 and last['data_wait_seconds'] == 0.0
