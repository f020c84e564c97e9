"""Where the time went adds up to the wall time, whatever is nested in what."""

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.train import goodput

NAMES = st.sampled_from([goodput.STEPS, goodput.DATA, goodput.EVALUATION])
# A block: its name, seconds before what is in it, the blocks in it, seconds after.
BLOCKS = st.recursive(
    st.tuples(NAMES, st.integers(0, 9), st.just([]), st.integers(0, 9)),
    lambda inner: st.tuples(NAMES, st.integers(0, 9), st.lists(inner, max_size=3), st.integers(0, 9)),
    max_leaves=8,
)


@given(st.lists(BLOCKS, max_size=4))
def test_each_moment_belongs_to_the_innermost_block(blocks):
    now, expected = [0.0], {goodput.OTHER: 0.0}
    timeline = goodput.Timeline(lambda: now[0])

    def run(block):
        name, before, inner, after = block
        expected[name] = expected.get(name, 0.0) + before + after
        with timeline.during(name):
            now[0] += before
            for one in inner:
                run(one)
            now[0] += after

    for block in blocks:
        run(block)
    now[0] += 1.0
    expected[goodput.OTHER] += 1.0
    found = timeline.seconds()
    assert found == pytest.approx(expected) and sum(found.values()) == pytest.approx(now[0])


def test_an_error_ends_a_block():
    now = [0.0]
    timeline = goodput.Timeline(lambda: now[0])
    with pytest.raises(ValueError), timeline.during(goodput.STEPS):
        now[0] = 2.0
        raise ValueError
    now[0] = 3.0
    assert timeline.seconds() == {goodput.STEPS: 2.0, goodput.OTHER: 1.0}


def test_processes_of_a_run_add_up_and_foreign_lines_are_left_out(tmp_path):
    folder = epath.Path(tmp_path)
    assert goodput.read(folder) == {}
    goodput.add(folder, 0, 5, {'steps': 3.0, 'idle': 1.0})
    with (folder / goodput.FILE).open('a') as file:
        file.write('3\n{"seconds": {"steps": "x", "idle": -1}}\n{"sec\n')
    goodput.add(folder, 5, 9, {'steps': 2.0, 'compile': 4.0})
    assert goodput.read(folder) == {'steps': 5.0, 'compile': 4.0, 'idle': 1.0}
    assert goodput.describe(goodput.read(folder)) == 'steps 50.0% · compile 40.0% · idle 10.0%'
