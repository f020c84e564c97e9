"""The line that reports start-up times."""

import re

from remixer_t5x import startup


def test_phases_are_printed_once_and_add_up():
    lines = []
    startup.start_timer()
    startup.end_phase('imports')
    startup.end_phase('compile')
    startup.report_phases(lines.append)
    startup.end_phase('later')
    startup.report_phases(lines.append)
    (line,) = lines
    assert re.fullmatch(
        r'start-up [\d.]+ s \([\d.]+ of .*\): imports [\d.]+ s \([\d.]+\) · compile [\d.]+ s \(.*\)', line
    )
