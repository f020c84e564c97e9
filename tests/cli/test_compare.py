"""`compare`: plans, real runs, failures, and `--model`."""

import argparse
import csv
import dataclasses
import json
import os
import re
import sys

import pytest

from remixer_t5x.cli import train
from remixer_t5x.cli.main import main
from remixer_t5x.config import gin_files, loading
from remixer_t5x.costs.model_counts import ModelCounts
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import compare as command
from remixer_t5x.extras.reports import cost_matching, sweep
from remixer_t5x.models.sublayers import attention, feed_forward, fnet, hyper_mixer, remixer
from tests.support import feed_forward as feed_forward_only

SMALL = [
    *('--gin_file=models/remixer.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_text.gin'),
    *('--gin_file=optimizers/adamw_rms.gin', '--gin_file=hardware/cpu.gin', '--gin_file=runs/pretrain.gin'),
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=16', '--gin.MLP_DIM=16'),
    *('--gin.REMIXER_DIM=16', '--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384', '--gin.BATCH_SIZE=4'),
    *("--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}", '--gin.TRAIN_STEPS=2', '--gin.WARMUP_STEPS=1'),
    *('--gin.LOG_PERIOD=1', '--gin.EVAL_PERIOD=2', '--gin.EVAL_STEPS=1', '--gin.CHECKPOINT_PERIOD=2'),
]


@pytest.mark.parametrize(
    ('model', 'sublayers'),
    [
        ('remixer', [attention.SelfAttention, remixer.Remixer]),
        ('hyper_mixer+ENCODER_SUBLAYERS=(%ENCODER_MIXER,)', [hyper_mixer.HyperMixer]),
        ('t5_1_1+sublayers/fnet+ENCODER_MIXER=@fnet.FNet', [fnet.FNet, feed_forward.GatedMLP]),
    ],
)
def test_a_model_replaces_the_one_that_an_experiment_includes(model, sublayers):
    (model,) = loading.load_macro_values(
        loading.ConfigSources(['experiments/cogs_cpu.gin'], model=gin_files.parse_model_flag(model)), 'MODEL'
    )
    ((layer, _),) = model.module.encoder_stack().runs
    assert [type(sublayer()) for sublayer in layer().sublayers] == sublayers and model.vocab_size == 896


def test_a_setting_of_a_model_overrides_the_files_after_the_model(tmp_path):
    (tmp_path / 'recipe.gin').write_text("include 'models/t5_1_1.gin'\ninclude 'sizes/tiny.gin'\nDROPOUT_RATE = 0.0\n")
    model = gin_files.parse_model_flag('remixer+REMIXER_DIM=24+DROPOUT_RATE=0.1')
    sources = loading.ConfigSources([str(tmp_path / 'recipe.gin')], [('DROPOUT_RATE', '0.2')], model=model)
    assert loading.load_macro_values(sources, 'REMIXER_DIM', 'DROPOUT_RATE') == [24, 0.2]
    sources = dataclasses.replace(sources, flags=())
    assert loading.load_macro_values(sources, 'DROPOUT_RATE') == [0.1]


def test_the_model_flag_accepts_shipped_and_custom_files():
    files = ['mine.gin', 'models/remixer.gin', 'remixer.gin', 'sublayers/fnet.gin', 'X=1']
    assert gin_files.parse_model_flag('mine+remixer+remixer.gin+sublayers/fnet+X=1') == files


def compare(*arguments):
    return main(['compare', 'train', *SMALL, *arguments])


def make_plan(*arguments):
    parser = argparse.ArgumentParser(epilog='')
    command.add_arguments(parser)
    args = ['train', '--models=t5_1_1,remixer', '--folder=f', *arguments]
    return command.build_plan(parser.parse_args(args, argparse.Namespace(gin_flags=())))


def plan_settings(*arguments):
    return make_plan(*arguments).settings


def test_plans_have_named_models_and_a_grid_of_settings_or_a_random_part_of_it():
    models = '/folder/mine.gin,/folder/v1.2.gin,bert+sublayers/fnet+MLP_DIM=8'
    assert list(make_plan(f'--models={models}').models) == ['mine', 'v1.2', 'bert+fnet+MLP_DIM=8']
    (values,) = zip(*plan_settings("--over=A='x, (','[y',(1, (2, 3)),{'z': ']'}"), strict=True)
    assert [value for _, value in values] == ["'x, ('", "'[y'", '(1, (2, 3))', "{'z': ']'}"]
    grid = plan_settings('--over=A=1,2', '--over', 'B=(1, 2),@x.Y')
    assert grid == [(('A', a), ('B', b)) for a in ('1', '2') for b in ('(1, 2)', '@x.Y')]
    few, more = (plan_settings('--over=A=1,2,3,4,5,6', f'--over_random={count}') for count in (2, 4))
    assert more[:2] == few and len(set(more)) == 4 and plan_settings() == [()]


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--models=,'], '--models must name at least one model; pass --models=t5_1_1,remixer'),
        (['--over_random=3'], '--over_random must be omitted without --over'),
        (['--models=remixer', '--equal=time'], '--equal must be omitted for one model'),
        (['--models=remixer,remixer+A=1', '--over=A=1,2'], 'must not set A, which another flag sets for all models'),
        (['--models=remixer,remixer+SEED=1'], 'must not set SEED, which another flag sets'),
        (["--over=BEST_METRICS='mean',None"], 'must not change how results are compared; pass --gin.BEST_METRICS='),
    ],
)
def test_invalid_flags_are_rejected(flags, message):
    with pytest.raises(UserError, match=message):
        make_plan(*flags)


def test_distinct_models_and_settings_have_distinct_folders():
    plan = make_plan('--models=remixer+A=@b/c,remixer+A=@b_c', '--over=B=(1, 2),[1, 2],1e-3')
    cells = [plan.build_cell(model, setting, 0) for model in plan.models for setting in plan.settings]
    assert len({cell.folder for cell in cells}) == 6
    assert cells[0].folder.parent.name == 'B=%281,%202%29' and cells[2].folder.parent.name == 'B=1e-3'


def test_equal_time_refuses_a_search_over_the_number_of_steps():
    assert make_plan('--over=TRAIN_STEPS=1,2').settings
    for steps in ('TRAIN_STEPS', 'TRAIN_STEPS_RELATIVE'):
        with pytest.raises(UserError, match='must name a macro that neither compare nor an earlier --over sets'):
            make_plan(f'--over={steps}=1,2', '--equal=time')


def test_finetuning_runs_are_continued_and_timed_with_the_macro_of_their_steps(tmp_path, monkeypatch, capsys):
    def run(self, cells):
        assert not self._finished
        commands.extend(cell.command for cell in cells)
        raise sweep.SweepStopped(7)

    commands = []
    costs = ModelCounts({('a',): 1000}, {(): 2e6}, tokens=100)
    monkeypatch.setattr('remixer_t5x.costs.model_counts.count_model_costs', lambda *args: costs)
    monkeypatch.setattr(sweep.Sweep, 'run', run)
    recipe, model = 'experiments/quickstart.gin', ['models/t5_1_1.gin']
    flags = [('SEED', '0'), ('MODEL_DIR', 'x')]
    loading.load_gin_config(loading.ConfigSources([recipe], flags, model=model), train.ROOT, partial=False)
    folder = tmp_path / 'runs/t5_1_1/seed_0'
    folder.mkdir(parents=True)
    (folder / 'config.gin').write_text(loading.get_config_text())
    # The steps may also change in a gin file, so that the command does not.
    (tmp_path / 'runs' / sweep.FINISHED_FILE).write_text(json.dumps([f'--gin.MODEL_DIR={folder}']) + '\n')
    for steps in ('TRAIN_STEPS', 'TRAIN_STEPS_RELATIVE'):
        arguments = ['compare', 'finetune', f'--gin_file={recipe}', '--models=t5_1_1,remixer', f'--gin.{steps}=600']
        assert main([*arguments, f'--folder={tmp_path}/runs']) == 7, capsys.readouterr().err
        commands.clear()
        assert main([*arguments, f'--folder={tmp_path}/timed', '--equal=time']) == 7
        assert all(f'--gin.{steps}=150' in words for words in commands) and len(commands) == 2
    # Timings with other settings are not used.
    timing = tmp_path / 'timed/t5_1_1/timing'
    os.renames(folder, timing)
    (tmp_path / 'timed' / sweep.FINISHED_FILE).write_text(json.dumps([f'--gin.MODEL_DIR={timing}']) + '\n')
    assert main([*arguments, f'--folder={tmp_path}/timed', '--equal=time']) == 2
    assert f'{timing} was started with other settings' in capsys.readouterr().err


def table_rows(output):
    """Returns the cells of each row of the printed tables by the row's heading."""
    lines = (re.split(r'\s{2,}', line.strip()) for line in output.splitlines())
    return {heading: texts for heading, *texts in lines}


def test_a_sweep_prints_a_table_writes_a_report_and_is_not_repeated(tmp_path, capsys, monkeypatch, warm_python):
    monkeypatch.setattr(sweep, 'PROGRAM', (*warm_python.command, '-m', 'remixer_t5x.cli.main'))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'text.txt').write_text('\n\n'.join(f'The number {i} is after {i - 1}. ' * 4 for i in range(200)))
    (tmp_path / 'custom').mkdir()
    (tmp_path / 'custom/mine.gin').write_text("include 'models/remixer.gin'\n")
    arguments = [f'--gin.FILES={tmp_path}/text.txt', '--models=t5_1_1,custom/mine.gin', f'--folder={tmp_path}/runs']
    arguments += ['--equal=parameters', *feed_forward_only.FLAGS]
    assert compare(*arguments) == 0
    output = capsys.readouterr()
    assert '2 runs, 0 finished before' in output.err and 'mine has REMIXER_DIM' in output.err
    rows = table_rows(output.out)
    parameters = [int(text.replace(',', '')) for text in rows['parameters']]
    assert abs(parameters[1] / parameters[0] - 1) <= cost_matching.TOLERANCE
    losses = [json.loads(line) for line in (tmp_path / 'runs/mine/seed_0/metrics.jsonl').read_text().splitlines()]
    held_out = [record['loss'] for record in losses if record['kind'] != 'train'][-1]
    assert rows['held-out loss'][1] == f'{held_out:.4f}' and rows['seeds'] == ['1', '1']
    assert 'one seed: no interval' in output.out
    assert (tmp_path / 'runs/report.html').read_text().startswith('<!DOCTYPE html>')
    monkeypatch.setattr(command, '_show_results', lambda *args: None)
    assert compare(*arguments) == 0
    assert '2 runs, 2 finished before' in capsys.readouterr().err
    # More steps would continue the runs. Other changes are reported before the first run.
    settings = ['--gin.LEARNING_RATE=0.5', '--gin.BATCH_SIZE=2', '--gin.TRAIN_STEPS=4']
    with (tmp_path / 'text.txt').open('a') as file:
        file.write('More text.\n')
    (tmp_path / 'custom/bad.gin').write_text("include 'models/t5_1_1.gin'\nENCODER_MIXER = @attention.NoSuchMixer\n")
    advice = 'use another --folder'
    for flags, words in (
        (settings, ('BATCH_SIZE 4 -> 2', '-> 0.5', 'seed_0', advice)),
        (['--models=remixer,custom/bad'], ('error: bad: ', 'NoSuchMixer')),
        ([], ('own_text_span_corruption has different files', advice)),
    ):
        assert compare(*arguments, *flags) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert all(word in line for word in words) and '-> 4' not in line
    assert not (tmp_path / 'runs/remixer').exists()


TIMED = """
import json, pathlib, sys
words = dict(word.removeprefix('--gin.').split('=', 1) for word in sys.argv if '=' in word)
if words['LEARNING_RATE'] == '1e3':
    sys.exit('error: the loss is not finite')
folder = pathlib.Path(words['MODEL_DIR'])
folder.mkdir()
(folder / 'remixer_t5x_run.json').write_text('{}')
names = ('TRAIN_STEPS', 'SEED', 'settings.Folder.best_metrics')
(folder / 'config.gin').write_text(''.join(f'{name} = {words[name]}\\n' for name in names))
loss = (1 + int(words['SEED'])) * 2 * float(words['LEARNING_RATE'])
timing = {'seconds_per_step': 2.0 if 'mine' in words['--model'] else 1.0}
lines = [{'kind': 'train', 'step': 1, 'loss': 6.0, 'timing': timing}, {'kind': 'eval', 'step': 1, 'loss': loss}]
lines.append({'kind': 'eval/cb', 'step': 1, 'accuracy': 50.0, 'wer': loss})
(folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\\n' for line in lines))
"""


def test_a_search_chooses_settings_at_equal_training_time(tmp_path, monkeypatch, capsys):
    (tmp_path / 'program.py').write_text(TIMED)
    monkeypatch.setattr(sweep, 'PROGRAM', (sys.executable, str(tmp_path / 'program.py')))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.gin').write_text("include 'models/t5_1_1.gin'\nENCODER_SUBLAYERS = (%ENCODER_MIXER,)\n")
    (tmp_path / 'text.txt').write_text('some text')
    arguments = ['--models=t5_1_1,mine.gin', '--folder=runs', '--equal=time', '--over=LEARNING_RATE=1e3,1e-2,1e-3']
    flags = ['--gin.FILES=text.txt', '--gin.LEARNING_RATE=1', '--gin.MLP_DIM=512']
    flags.append("--gin.settings.Folder.best_metrics={'cb': 'wer'}")
    assert compare(*arguments, '--seeds=0,1', *flags) == 1
    output = capsys.readouterr()
    assert 'mine was trained for 1 steps instead of 2' in output.err and 'more FLOPs than mine' in output.err
    assert 'FAILED mine, LEARNING_RATE=1e3, seed 0: error: the loss is not finite' in output.err
    rows = table_rows(output.out)
    assert 'search: wer' in output.out
    assert rows['best setting'] == ['LEARNING_RATE=1e-3'] * 2 and rows['seeds'] == ['2', '2']
    assert rows['LEARNING_RATE=1e-2'] == ['0.02'] * 2 and rows['LEARNING_RATE=1e3'] == ['-', '-']
    steps = [
        (tmp_path / f'runs/{name}/LEARNING_RATE=1e-3/seed_1/config.gin').read_text() for name in ('t5_1_1', 'mine')
    ]
    assert [text.splitlines()[0] for text in steps] == ['TRAIN_STEPS = 2', 'TRAIN_STEPS = 1']
    with (tmp_path / 'runs/runs.csv').open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8 and all(int(line['parameters']) > 0 for line in lines)
    assert [line['held_out_loss'] for line in lines if line['error']] == ['', '']
    assert lines[-1]['error'] == 'error: the loss is not finite'
    html = (tmp_path / 'runs/report.html').read_text()
    failure = 'mine, LEARNING_RATE=1e3, seed 0</b> failed: error: the loss is not finite'
    assert all(words in html for words in (failure, 'for 1 steps instead of 2', 'expected best of 2'))
    assert (tmp_path / 'runs/figures/comparison-1.png').exists()
