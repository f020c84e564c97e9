"""`remixer-t5x reproduce`: entries are complete and valid, and verdicts follow their intervals."""

import argparse
import dataclasses
import itertools
import json
import re

import pytest

from remixer_t5x.cli import main, train
from remixer_t5x.config import gin_files, loading
from remixer_t5x.extras.reports import sweep
from remixer_t5x.extras.reproduce import table_runs, tables
from remixer_t5x.run_folder import model_dir
from tests.support.error_lines import error_message

ARGS = argparse.Namespace(
    gin_file=[], gin_flags=[], gin_search_paths=[], tfds_data_dir=None, verbose=True, folder='runs'
)
# Numbers of the tables and figures of each paper.
PAPERS = {
    'remixers': ([1, 2, 3, 4, 5], [1, 2]),
    'hyper_mixer': ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
    'gmlp': ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8]),
    'tim': ([1, 2], [1, 2, 3, 4]),
}


def load_tables(scale):
    """Yields the tables that are defined at a scale."""
    for name, entry in tables.list_tables().items():
        small = [column for column in entry.get('columns', {}).values() if 'small' in column]
        if 'reason' not in entry and (scale == tables.PAPER or small):
            yield tables.load_table(name, scale)


def test_every_table_and_figure_has_an_entry_or_a_reason():
    entries = tables.list_tables()
    assert {*PAPERS, 'mlp_slides'} == set(tables.read_papers()), 'add the new paper to PAPERS'
    for paper, (numbers, figures) in PAPERS.items():
        assert {f'{paper}/table_{n}' for n in numbers} | {f'{paper}/figure_{n}' for n in figures} <= set(entries)
    for name, entry in entries.items():
        assert ('reason' in entry) != ('rows' in entry), name
        for numbers in entry.get('rows', {}).values():
            assert len(numbers) == len(entry['columns']), f'{name}: write nan for a missing number'
    for table in (*load_tables(tables.PAPER), *load_tables(tables.SMALL)):
        assert table.baseline in [row.name for row in table.rows], table.name
        assert all(number is None or number == number for row in table.rows for number in row.numbers), table.name


def test_every_stage_and_model_is_a_valid_configuration():
    """Every stage and every model of both scales, up to the numbers in its flags, is loaded at least once."""
    stages, models = set(), set()
    for table in itertools.chain(load_tables(tables.PAPER), load_tables(tables.SMALL)):
        for index in range(max(len(table.stages), len(table.rows))):
            stage, row = table.stages[index % len(table.stages)], table.rows[index % len(table.rows)]
            stage_settings = (*stage.files, str(stage.flags), bool(stage.previous_stage))
            model_settings = (row.model, *row.files, re.sub(r'\d+', '', str(row.flags)))
            if stage_settings in stages and model_settings in models:
                continue
            stages.add(stage_settings)
            models.add(model_settings)
            flags = {**stage.flags, **row.flags, 'MODEL_DIR': '/nowhere'}
            if stage.previous_stage:
                flags['INITIAL_CHECKPOINT_PATH'] = '/nowhere'
            flags = [(name, str(value)) for name, value in flags.items()]
            files = [*stage.files, *row.files]
            sources = loading.ConfigSources(files, flags, model=gin_files.parse_model_flag(row.model))
            loading.load_gin_config(sources, train.ROOT, partial=False)
    assert len(stages) > 25 and len(models) > 60


@pytest.mark.parametrize(
    ('table', 'row', 'published'),
    [
        ('remixers/table_1', 'Remixer base, F 3312', 324),
        ('gmlp/table_4', 'gMLP 144', 357),
        ('tim/table_2', 'TIM, all layers', 110),
    ],
)
def test_models_have_the_papers_number_of_parameters(table, row, published):
    loaded_table = tables.load_table(table, tables.PAPER)
    (model,) = [model for model in loaded_table.rows if model.name == row]
    (column,) = [column for column in loaded_table.columns if column.metric == tables.PARAMETERS]
    assert model.numbers[loaded_table.columns.index(column)] == published
    assert table_runs.compute_run_cost(column.stage, model, ARGS).parameters / 1e6 == pytest.approx(published, rel=0.03)


def test_a_stage_without_settings_of_the_scale_is_named(monkeypatch):
    monkeypatch.delitem(tables.read_papers()['remixers']['stages']['super_glue'], tables.SMALL)
    error = error_message(tables.load_table, 'remixers/section_3_1_2', tables.SMALL)
    assert 'stage super_glue has no settings for the scale small' in error


def small_table(metric='accuracy', numbers=(70.0, 72.0, 69.0, None)):
    stage = tables.TrainingStage('task', 'finetune', ['experiments/quickstart.gin'])
    rows = [tables.TableRow(name, 't5_1_1', (), {}, [n]) for name, n in zip('abcd', numbers, strict=True)]
    return tables.PaperTable('x/table_1', 'x', [tables.TableColumn('x', stage, 'eval/x', metric)], rows, 'a', [stage])


@pytest.mark.parametrize(
    ('metric', 'ours', 'expected'),
    [
        # Student's quantile for two degrees of freedom is 2.91999; differences of 1, 2 and 3 have mean 2, deviation 1.
        ('accuracy', [1, 2, 3], (2.0, 2.91999 / 3**0.5, table_runs.REPRODUCED)),
        ('accuracy', [-1, -2, -3], (-2.0, 2.91999 / 3**0.5, table_runs.CONTRADICTED)),
        ('accuracy', [-2, 2, 4], (4 / 3, 2.91999 * (28 / 9) ** 0.5, table_runs.NOT_SHOWN)),
        ('perplexity', [1, 2, 3], (2.0, 2.91999 / 3**0.5, table_runs.REPRODUCED)),
        ('accuracy', [2], (2.0, float('inf'), table_runs.NOT_SHOWN)),
    ],
)
def test_verdict_is_the_sign_of_the_interval(metric, ours, expected):
    base = {seed: 10.0 + seed for seed in range(len(ours))}
    results = {('a', 'x'): base, ('b', 'x'): {seed: base[seed] + value for seed, value in enumerate(ours)}}
    findings = {row.name: finding for _, row, finding in table_runs.compare_with_paper(small_table(metric), results)}
    assert (findings['b'].difference, findings['b'].margin, findings['b'].verdict) == (
        pytest.approx(expected[0]), pytest.approx(expected[1], rel=1e-4), expected[2],
    )  # fmt: skip
    assert findings['b'].published_difference == 2.0 and findings['a'].verdict == findings['c'].verdict == ''


def test_finetuning_starts_from_the_pretraining_of_its_model_and_seed(tmp_path):
    table = tables.load_table('remixers/table_4', tables.PAPER)
    cells = table_runs.plan_runs(
        table, argparse.Namespace(**{**vars(ARGS), 'gin_flags': [('BATCH_SIZE', '8')]}), [0, 1], tmp_path
    )
    assert [stage for stage, _, _ in cells] == ['c4'] * 8 + ['cogs'] * 8
    cell = cells['cogs', 'T5.1.1 large', 1]
    assert f'--gin.INITIAL_CHECKPOINT_PATH={cells["c4", "T5.1.1 large", 1].folder}' in cell.command
    assert {'--gin_file=sizes/large.gin', '--gin.EVAL_SPLIT=gen', '--gin.BATCH_SIZE=8', '--gin.SEED=1'} <= set(
        cell.command
    )
    assert len({cell.folder for cell in cells.values()}) == len(cells)


def test_the_table_shows_our_numbers_next_to_those_of_the_paper(tmp_path, monkeypatch, capsys):
    """Remixer is 5 points better than T5.1.1 in the fake runs with seeds 0 to 2, and diverges with seed 3."""

    def run_cells(self, cells, parallel):
        assert self.folder == tmp_path and len(cells) == 8
        for cell in cells:
            value = 50.0 + cell.seed + (5.0 + 0.1 * cell.seed) * cell.model.startswith('Remixer')
            value = None if cell.seed == 3 and cell.model.startswith('Remixer') else value
            record = {'kind': 'eval/mini_cogs_generalization', 'step': 300, 'exact_match': value}
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / model_dir.MARKER_FILE).write_text('{}')
            (cell.folder / 'metrics.jsonl').write_text(json.dumps(record) + '\n')

    monkeypatch.setattr(sweep.Sweep, 'run', run_cells)
    table = tables.load_table('remixers/table_4', tables.SMALL)
    table = dataclasses.replace(table, rows=table.rows[1:])
    monkeypatch.setattr(tables, 'load_table', lambda *names: table)
    assert main.main(['reproduce', 'remixers/table_4', f'--folder={tmp_path}', '--seeds=0,1,2,3']) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if 'Remixer base' in line and '79.2' in line]
    assert row[2:] == ['79.2', '56.1', '±', '1.1', '+1.8', '+5.1', '±', '0.17', 'reproduced']
    assert any(line.split()[:3] == ['Remixer', 'base', 'cogs'] and '848,292' in line for line in lines)


def test_a_stage_starts_after_all_runs_of_the_stage_before(tmp_path, monkeypatch):
    stages, failed = [], []

    def run_cells(self, cells, parallel):
        stages.append({cell.folder.parent.parent.name for cell in cells})
        failed.append({cell.folder.parent.name for cell in self.failed if cell in cells})
        self.failed[cells[0]] = 'error: boom'
        if len(stages) == 2:
            raise sweep.SweepStopped(130)

    monkeypatch.setattr(sweep.Sweep, 'run', run_cells)
    # Costs are counted in other tests.
    monkeypatch.setattr(table_runs, 'compute_run_cost', lambda *args: table_runs.RunCost(1, 1.0, 1, 1.0))
    assert main.main(['reproduce', 'remixers/table_4', '--scale=paper', f'--folder={tmp_path}']) == 130
    assert stages == [{'c4'}, {'cogs'}]
    # A model whose pretraining failed is not finetuned.
    assert failed == [set(), {'MixerEnc_base'}]


def test_models_are_finetuned_again_after_a_longer_pretraining(tmp_path, monkeypatch, capsys):
    pretrained, finetuned = (tmp_path / f'{stage}/T5_1_1_base/seed_0' for stage in ('c4', 'cogs'))
    for folder in (pretrained, finetuned):
        folder.mkdir(parents=True)
    (pretrained / model_dir.CONFIG).write_text('TRAIN_STEPS = 7\n')
    (tmp_path / sweep.FINISHED_FILE).write_text(json.dumps([f'--gin.MODEL_DIR={pretrained}']) + '\n')
    monkeypatch.setattr(sweep.Sweep, 'run', None)
    monkeypatch.setattr(table_runs, 'compute_run_cost', lambda *args: table_runs.RunCost(1, 1.0, 1, 1.0))
    monkeypatch.setattr(loading, 'get_config_text', lambda: 'TRAIN_STEPS = 9\n')
    monkeypatch.setattr(sweep, '_describe_data_change', lambda folder: None)
    assert main.main(['reproduce', 'remixers/table_4', '--scale=paper', f'--folder={tmp_path}']) == 2
    assert 'cogs/T5_1_1_base/seed_0 started from fewer steps of' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('words', 'advice'), [(['remixers/tabel_4'], 'remixers/table_4'), (['remixers/table_4', '--gin.SEED=1'], '--seeds')]
)
def test_invalid_arguments_raise_a_one_line_error_with_advice(words, advice, capsys):
    assert main.main(['reproduce', *words]) == 2
    assert advice in capsys.readouterr().err.strip().splitlines()[-1]
