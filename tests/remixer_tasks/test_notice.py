"""Progress lines in a terminal and in a log."""

import sys

import pytest

from remixer_tasks.files.notice import Notice


@pytest.mark.parametrize('is_terminal', [True, False])
def test_steps_redraw_a_terminal_line_and_print_every_tenth_in_a_log(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal, raising=False)
    notice = Notice('reading text')
    for number in range(1, 21):
        notice.step(number, 20, 'parts')
    notice.done('20 documents')
    output = capsys.readouterr().err
    assert output.count('parsed') == (20 if is_terminal else 10)
    assert output.count('\n') == (1 if is_terminal else 12)
    assert 'reading text: parsed 20 of 20 parts' in output
    assert 'reading text: 20 documents (' in output
