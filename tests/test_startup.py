"""The line about start-up."""

import re

from remixer_t5x import startup


def test_phases_are_said_once_and_add_up():
    said = []
    startup.begin()
    startup.done('imports')
    startup.done('compile')
    startup.report(said.append)
    startup.done('later')
    startup.report(said.append)
    (line,) = said
    assert re.fullmatch(
        r'start-up [\d.]+ s \([\d.]+ of .*\): imports [\d.]+ s \([\d.]+\) · compile [\d.]+ s \(.*\)', line
    )


def test_nothing_is_said_without_a_beginning():
    said = []
    startup.done('imports')
    startup.report(said.append)
    assert said == []
