"""Library chatter stays off the screen, also what is written below Python; what goes wrong is shown."""

import os
import subprocess
import sys

import pytest

from remixer_t5x import lazy
from remixer_t5x.errors import UserError


def test_loading_tensorflow_prints_nothing():
    pytest.importorskip('tensorflow', reason='TensorFlow is not installed')
    code = (
        'import sys\n'
        'from remixer_t5x import lazy\n'
        'from remixer_t5x.cli import streams\n'
        'streams.hush()\n'
        'lazy.tf.__version__\n'
        'sys.stderr.write("on")\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', 'on')


def test_a_mistake_stays_one_line(capfd):
    with pytest.raises(UserError):
        with lazy.without_stderr():
            os.write(2, b'chatter')
            raise UserError('the line')
    assert capfd.readouterr().err == ''


def test_what_was_held_back_is_shown_when_it_fails(capfd):
    with pytest.raises(ImportError):
        with lazy.without_stderr():
            os.write(2, b'the reason')
            raise ImportError
    assert capfd.readouterr().err == 'the reason'
