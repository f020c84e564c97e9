"""Tests of scripts/studies: the toy task of the paper, resuming after a kill, and TIM's images."""

import json
import pathlib
import sys
import types

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / 'scripts'
TINY = types.MappingProxyType({'length': 50, 'width': 4, 'hidden': 4, 'steps': 3, 'batch': 2, 'test_examples': 5})


@pytest.fixture(scope='module')
def studies():
    """Yields the scripts' modules, imported with their folder on sys.path, as when a script runs."""
    before = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(SCRIPTS / 'studies')]
    import competition
    import toy_task
    import two_sources
    from library import toy_data

    modules = (competition, toy_data, toy_task, two_sources)
    yield types.SimpleNamespace(**{module.__name__.rpartition('.')[2]: module for module in modules})
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if str(SCRIPTS) in str(getattr(sys.modules[name], '__file__', None)):
            sys.modules.pop(name, None)


def parse_row(row):
    """Returns the shapes of an input row, which of them are triangles, and the target row of appendix B.4."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row != 0, [0]])))
    shapes = [(start, row[start:end]) for start, end in edges.reshape(-1, 2)]
    kinds = np.asarray([np.ptp(shape) > 0 for _, shape in shapes])
    heights = np.asarray([shape.max() for _, shape in shapes])
    expected = np.zeros_like(row)
    for (start, shape), kind in zip(shapes, kinds, strict=True):
        expected[start : start + len(shape)] = shape / shape.max() * heights[kinds == kind].mean()
    return shapes, kinds, expected


@pytest.mark.parametrize('length', [47, 100])
def test_toy_task_rows_follow_the_papers_description(studies, length):
    inputs, targets, local = studies.toy_data.generate_examples(np.random.default_rng(0), 200, length)
    starts, first_kinds = [], []
    for row, target, guess in zip(inputs, targets, local, strict=True):
        shapes, kinds, expected = parse_row(row)
        assert len(shapes) == 4 and sum(kinds) == 2
        np.testing.assert_allclose(target, expected, rtol=1e-5)
        assert {len(shape) for _, shape in shapes} <= {5, 7, 9, 11}
        for start, shape in shapes:
            expected_guess = shape / shape.max() * (shape.max() + 13) / 2  # heights are from 1 to 25
            np.testing.assert_allclose(guess[start : start + len(shape)], expected_guess, rtol=1e-5)
        assert np.all(guess[row == 0] == 0)
        starts.append([start for start, _ in shapes])
        first_kinds.append(kinds[0])
    heights = np.concatenate([[shape.max() for _, shape in parse_row(row)[0]] for row in inputs])
    assert 1 <= heights.min() < 2 and 24 < heights.max() <= 25
    assert 0.35 < np.mean(first_kinds) < 0.65
    if length == 100:  # shapes may touch both ends of the row
        assert min(start[0] for start in starts) == 0 and np.any(inputs[:, -1])


def test_toy_study_resumes_after_a_kill(studies, tmp_path, monkeypatch, capsys):
    out, figure = tmp_path / 'toy.jsonl', tmp_path / 'toy.png'

    def run_toy(*more):
        words = [f'--{name}={value}' for name, value in TINY.items()]
        command = ['toy_task.py', *words, f'--out={out}', '--seeds=2', '--mixers=none,hyper_mixer', '--examples=3']
        monkeypatch.setattr(sys, 'argv', [*command, *more])
        studies.toy_task.main()

    run_toy(f'--figure={figure}')
    first = out.read_text().splitlines()
    assert len(first) == 4 and figure.stat().st_size > 0
    table = capsys.readouterr().out
    assert 'not yet run' not in table and table.count('[2]') == 2

    # The run was killed after the first cell, while it wrote the second.
    out.write_text(first[0] + '\n' + first[1][:20])
    run_toy('--show')
    assert 'not yet run' in capsys.readouterr().out
    run_toy()
    assert '4 runs, 1 already done' in capsys.readouterr().out
    second = out.read_text().splitlines()
    assert second[0] == first[0]
    numbers = [json.loads(line)['result']['test_mse'] for line in first[1:]]
    # A result does not depend on earlier cells.
    np.testing.assert_allclose([json.loads(line)['result']['test_mse'] for line in second[2:]], numbers, rtol=1e-4)

    run_toy('--learning_rate=0.1', '--show')
    assert 'not yet run' in capsys.readouterr().out.partition('[seeds]')[2]  # other settings are other cells


def test_weights_belong_to_the_pixel_that_the_decoder_has_read(studies):
    module = studies.two_sources
    model, params, loss = module.train_model(False, seed=0, tim_layers=1, steps=1, batch_size=2, learning_rate=1e-2)
    images = module.make_images(np.random.default_rng(1), 2, shuffled=False)
    changed = images.copy()
    changed[0, -1, -1] = (changed[0, -1, -1] + 3) % module.LEVELS
    (before,), (after,) = (module.compute_competition_weights(model, params, batch) for batch in (images, changed))
    assert before.shape == images.shape and np.all((before > 0) & (before < 1)) and 1 < loss < 4
    differs = np.abs(before - after) > 1e-6
    assert differs[0, -1, -1] and differs.sum() == 1
