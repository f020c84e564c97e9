"""The best parameters of a task: kept once, replaced by better ones only, readable as a checkpoint."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import best
from remixer_t5x.evaluate.task_evaluation import Report

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
RECORD = {'vocabulary': 'ab12 of 384 ids'}


def report(task='rte', **metrics):
    return Report(task, 'validation', metrics, (), 0.0)


def params(value):
    return {'table': jnp.full((4, 2), float(value))}


def value_of(path):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params(0))
    return float(saved_params.restore_params(str(path), abstract, RECORD['vocabulary'])['table'][0, 0])


def test_only_better_ones_replace_it(tmp_path):
    kept = best.BestCheckpoints(saved_params.model_dir.absolute(tmp_path), RECORD)
    values = {10: 50.0, 20: 60.0, 30: 60.0, 40: 55.0}
    assert [kept.keep(report(accuracy=value, f1=-value), step, params(step)) for step, value in values.items()] == [
        True,
        True,
        False,
        False,
    ]
    assert value_of(tmp_path / 'best' / 'rte') == 20.0
    assert [path.name for path in (tmp_path / 'best' / 'rte').iterdir() if path.name.isdigit()] == ['20']
    found = best.kept_in(str(tmp_path))
    assert found == {
        'rte': {'task': 'rte', 'metric': 'accuracy', 'value': 60.0, 'step': 20, 'path': str(tmp_path / 'best/rte/20')}
    }


def test_a_run_that_goes_on_knows_what_it_kept(tmp_path):
    folder = saved_params.model_dir.absolute(tmp_path)
    assert best.BestCheckpoints(folder, RECORD).keep(report(accuracy=60.0), 20, params(1))
    again = best.BestCheckpoints(folder, RECORD)
    assert not again.keep(report(accuracy=60.0), 20, params(2))
    assert again.keep(report(accuracy=61.0), 20, params(3)) and value_of(tmp_path / 'best' / 'rte') == 3.0


def test_the_metric_can_be_named_by_task(tmp_path):
    folder = saved_params.model_dir.absolute(tmp_path)
    kept = best.BestCheckpoints(folder, RECORD, {'cb': 'f1'})
    assert kept.score(report('cb', accuracy=1.0, f1=2.0)) == ('f1', 2.0)
    assert kept.score(report('rte', accuracy=1.0)) == ('accuracy', 1.0)
    assert not kept.keep(report('rte'), 1, params(1))
    with pytest.raises(UserError, match="BEST_METRICS names 'f1' for cb, which has accuracy"):
        kept.keep(report('cb', accuracy=1.0), 1, params(1))


@pytest.mark.parametrize('values', [[10.0, 90.0, np.nan, 50.0, 95.0], [np.nan, 10.0, np.nan, 5.0, 11.0]])
def test_a_metric_that_is_nan_is_never_better(tmp_path, values):
    folder = saved_params.model_dir.absolute(tmp_path)
    kept = [best.BestCheckpoints(folder, RECORD).keep(report(quality=value), step, params(step))
            for step, value in enumerate(values, 1)]  # fmt: skip
    highest = [-np.inf, *np.fmax.accumulate(values)[:-1]]
    assert kept == [bool(value > before or np.isnan(before)) and not np.isnan(value)
                    for value, before in zip(values, highest, strict=True)]  # fmt: skip
    assert best.kept_in(str(tmp_path))['rte']['value'] == np.nanmax(values)


@pytest.mark.parametrize(
    ('name', 'wanted'),
    [('mean_absolute_error', None), ('eval_loss', None), ('perplexity', None), ('mean_absolute_error/short', None),
     ('quality', {'rte': '-quality'})],
)  # fmt: skip
def test_of_an_error_the_lowest_is_best(tmp_path, name, wanted):
    kept = best.BestCheckpoints(saved_params.model_dir.absolute(tmp_path), RECORD, wanted)
    values = [1.69, 1.23, 1.31, 1.21]
    assert [kept.keep(report(**{name: value}), step, params(step)) for step, value in enumerate(values, 1)] == [
        True, True, False, True
    ]  # fmt: skip
    assert value_of(tmp_path / 'best' / 'rte') == 4.0


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    kept = best.BestCheckpoints(saved_params.model_dir.absolute(tmp_path), RECORD)
    with pytest.raises(UserError, match='MiB left and the best parameters take'):
        kept.keep(report(accuracy=np.float64(1.0)), 1, params(1))


@pytest.mark.parametrize('found', ['3', '{}', '{"metric": "f1", "value": "x", "step": 1}', '[]'])
def test_a_record_without_the_best_is_one_line(tmp_path, found):
    step = epath.Path(tmp_path / 'best' / 'task' / '1')
    (step / 'state').mkdir(parents=True)
    (step / 'run').mkdir()
    (step / 'run' / 'metadata').write_text(f'{{"best": {found}}}')
    with pytest.raises(UserError, match='does not say which metric was best'):
        best.read_best(step)
    assert best.kept_in(str(tmp_path)) == {}
