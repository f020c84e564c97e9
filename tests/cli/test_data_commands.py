"""`remixer-t5x data list`, `get` and `show` with a folder of a few published files."""

import json

import pytest

from remixer_t5x.cli import main
from remixer_tasks import catalogue
from tests.support.paths import write_text

COMMITMENT = [{'premise': f'A naïve premise {i}.', 'hypothesis': 'B', 'label': 'neutral', 'idx': i} for i in range(3)]
WINOGRAD = [
    {
        'text': 'Ann told Sue that she was late.',
        'target': {'span1_index': 0, 'span1_text': name, 'span2_index': 4, 'span2_text': 'she'},
        'label': name == 'Ann',
        'idx': i,
    }
    for i, name in enumerate(['Sue', 'Ann'])
]


@pytest.fixture(autouse=True)
def published(tmp_path, monkeypatch, clean_environment):
    """Writes files of CB and WSC and a malformed `cogs/dev.tsv`; no other data are present."""
    folder = tmp_path / 'data'
    for name, rows in {'CB/val': COMMITMENT, 'CB/test': COMMITMENT[:1], 'WSC/train': WINOGRAD}.items():
        text = ''.join(json.dumps(row) + '\n' for row in rows)
        write_text(folder / 'super_glue' / f'{name}.jsonl', text)
    (folder / 'cogs').mkdir()
    (folder / 'cogs' / 'dev.tsv').write_text('no cells\n')
    monkeypatch.setenv('REMIXER_T5X_DATA', str(folder))
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'no_tfds'))
    return folder


def run_data(capsys, *argv):
    assert main.main(['data', *argv]) == 0
    return capsys.readouterr().out


def test_list_prints_every_task_and_the_location_of_its_data(published, tmp_path, capsys):
    rows = {line.split()[0]: ' '.join(line.split()) for line in run_data(capsys, 'list').splitlines() if line.strip()}
    assert set(catalogue.TASKS) <= set(rows)
    location = f'{published}/super_glue/CB'
    assert rows['super_glue_cb_v102'] == f'super_glue_cb_v102 validation, test train {location}'
    assert rows['super_glue_wsc_v102_simple_train'].endswith(f'train {published}/super_glue/WSC')
    assert rows['glue_qqp_v002'].endswith('train, validation, test remixer-t5x data get glue_qqp_v002')
    assert rows['abductive_nli_v001'].endswith('no download, see data get abductive_nli_v001')
    assert rows['cogs_v001'] == f'cogs_v001 validation train, test, gen {published}/cogs'
    output = run_data(capsys, 'list', f'--data_dir={tmp_path}/empty')
    assert f'0 of {len(catalogue.TASKS)} tasks are available; downloads go to {tmp_path}/empty' in output


def test_show_prints_fields_and_texts(capsys):
    output = run_data(capsys, 'show', 'super_glue_cb_v102', '--num_examples=2')
    # The train split is missing, so validation is the first available split.
    assert output.startswith('super_glue_cb_v102, split validation\n\nexample 1\n')
    assert '  premise     "A naïve premise 1."\n' in output
    assert '  inputs     → cb hypothesis: B premise: A naïve premise 1.\n  targets    → neutral\n' in output
    assert output.count('example ') == 2
    assert 'split test' in run_data(capsys, 'show', 'super_glue_cb_v102', '--split', 'test')


def test_show_keeps_an_example_beside_its_text(capsys):
    """The filter of WSC's training split excludes the first of two examples."""
    examples = run_data(capsys, 'show', 'super_glue_wsc_v102_simple_train').split('\nexample ')[1:]
    by_name = {'Sue': None, 'Ann': None}
    for example in examples:
        by_name[next(name for name in by_name if f'"{name}"' in example)] = example
    assert 'the task excludes this example' in by_name['Sue'] and '→' not in by_name['Sue']
    assert '→ Ann\n' in by_name['Ann']
