"""Compares commands in two processes of four devices each with one process of one device."""

import base64
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from remixer_t5x.checkpoints import checkpoint_manager
from remixer_t5x.cli import main, process_flags
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.devices import collectives
from remixer_t5x.devices import processes as distributed
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir
from tests.support import feed_forward, paths, ports
from tests.support.compare_runs import difference, last_step
from tests.support.real_processes import Process
from tests.train import lines_worker

DEVICES = 4
HEARTBEAT = 20
# Macros that make each model compile quickly. `mixed` has layers of HyperMixer and Remixer, and layers of TIM;
# `feed_forward` is a T5 without attention.
MODELS = {
    'feed_forward': {
        **{'EMBED_DIM': 16, 'MLP_DIM': 16, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1},
        **feed_forward.SETTINGS,
    },
    'mixed': {
        **{'HEAD_DIM': 8, 'TIM_NUM_HEADS': 2, 'TIM_EMBED_DIM': 16, 'TIM_MLP_DIM': 16},
        **{'REMIXER_DIM': 16, 'HYPER_MIXER_DIM': 16},
    },
}
MIXED = """
include 'models/tim.gin'
include 'sublayers/remixer.gin'
include 'sublayers/hyper_mixer.gin'
from __gin__ import dynamic_registration
from remixer_t5x.models.architecture import layer
from remixer_t5x.models.sublayers import hyper_mixer
from remixer_t5x.models.sublayers import remixer
ENCODER_MIXER = @encoder/hyper_mixer.HyperMixer
DECODER_MIXER = @decoder/hyper_mixer.HyperMixer
ENCODER_FEED_FORWARD = @encoder/remixer.Remixer
DECODER_FEED_FORWARD = @decoder/remixer.Remixer
ENCODER_RUNS = ((@encoder/layer.make_layer, 1), (@tim_encoder/layer.make_layer, 1))
DECODER_RUNS = ((@decoder/layer.make_layer, 1), (@tim_decoder/layer.make_layer, 1))
"""
# Settings of a run with several checkpoints and evaluations.
LONG = {'TRAIN_STEPS': 4, 'CHECKPOINT_PERIOD': 2, 'EVAL_PERIOD': 2}
# Folders in which a run of two processes is resumed by one, and vice versa.
RESUMED = {'together': 'together to alone', 'alone': 'alone to together'}
DATA = {
    'MIXTURE_OR_TASK_NAME': 'lines',
    'TASK_FEATURE_LENGTHS': {'inputs': 16, 'targets': 12},
    'VOCAB_SIZE': 264,
}
TRAINING = {
    'BATCH_SIZE': 16,
    'TRAIN_STEPS': 2,
    'LOG_PERIOD': 1,
    'EVAL_PERIOD': None,
    'EVAL_STEPS': None,
    'CHECKPOINT_PERIOD': 1000,
    'KEEP_CHECKPOINTS': None,
}


def gin(settings):
    return [f'--gin.{name}={value}' for name, value in settings.items()]


def model_flags(model='feed_forward'):
    """Returns the flags of `feed_forward`, or of the gin file of `mixed`."""
    name = pathlib.Path(model).stem
    files = [model if name == 'mixed' else 'models/t5_1_1.gin', 'sizes/tiny.gin', 'hardware/cpu.gin']
    return [f'--gin_file={file}' for file in files] + gin({**MODELS[name], **DATA})


def train(folder, model='feed_forward', shuffle=True, **settings):
    files = ['--gin_file=optimizers/adafactor_constant.gin', '--gin_file=runs/pretrain.gin']
    changes = {**TRAINING, 'MODEL_DIR': folder, 'train/pipeline.DatasetConfig.shuffle': shuffle, **settings}
    return ['train', *files, *model_flags(model), *gin(changes)]


def finetune(folder, model):
    """Returns a command that does not shuffle, and that evaluates and saves the best parameters at the end."""
    changes = {'INITIAL_CHECKPOINT_PATH': None, 'DROPOUT_RATE': 0.0, 'EVAL_BATCH_SIZE': 16, 'EVAL_EXAMPLES': 16}
    command = train(folder, model, shuffle=False, **changes, EVAL_PERIOD=2)
    return ['finetune', *[word.replace('runs/pretrain.gin', 'runs/finetune.gin') for word in command[1:]]]


class Commands:
    """Starts processes that run commands and can read the task `lines`."""

    def __init__(self, folder):
        self.folder = folder
        self.lines = [f'{chr(97 + i % 26) * 3} line {i}' for i in range(90)]
        self._file = folder / 'lines.txt'
        self._file.write_text(''.join(f'{line}\n' for line in self.lines))
        self._number = itertools.count(1)

    def start(self, *processes, folders=(None, None), function=lines_worker.work, arguments=()):
        """Starts processes. Each has a number of devices, commands, and settings to connect to the other processes.

        `folders` are their working directories.
        """
        return [
            Process(
                function,
                str(self._file),
                [[str(word) for word in command] for command in commands],
                join,
                *arguments,
                output=self.folder / f'output{next(self._number)}.txt',
                devices=devices,
                folder=folder,
                environment=paths.environment() | ({'REMIXER_T5X_CACHE': f'{folder}/cache'} if folder else {}),
            )
            for (devices, commands, join), folder in zip(processes, folders, strict=False)
        ]

    def run(self, *processes):
        return wait_for(self.start(*processes))


def wait_for(started):
    """Returns the exit code and the output of each process."""
    return [(process.wait(), process.output()) for process in started]


def pair(*commands):
    """Returns the arguments of two processes that run the same commands sequentially."""
    join = {'address': f'127.0.0.1:{ports.reserve()}', 'count': 2, 'initialization_timeout': 90}
    return [(DEVICES, commands, {**join, 'index': index}) for index in (0, 1)]


def pair_by_flags(command, *more):
    """Returns the arguments of two processes that run one command; `more` are additional flags of each."""
    flags = [
        f'--coordinator_address=127.0.0.1:{ports.reserve()}',
        '--process_count=2',
        '--initialization_timeout=90',
        f'--heartbeat_timeout={HEARTBEAT}',
    ]
    extra = more or ([], [])
    return [(DEVICES, [[*command, *flags, f'--process_index={index}', *extra[index]]], {}) for index in (0, 1)]


def alone(*commands):
    return [(1, commands, {})]


def losses(folder, kind='train'):
    records = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return {record['step']: (record['loss'], record['grad_norm']) for record in records if record['kind'] == kind}


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    for step in ours:
        np.testing.assert_allclose(ours[step], theirs[step], rtol=2e-4, err_msg=f'step {step}')


def copy_until(folder, copy, step):
    """Copies a run without its checkpoints after `step`."""
    shutil.copytree(folder, copy)
    for checkpoint in (copy / 'checkpoints').iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def processes(tmp_path_factory):
    return Commands(tmp_path_factory.mktemp('processes'))


@pytest.fixture(scope='module')
def runs(processes):
    """Runs commands in one process and in two, which also resume runs of each other.

    Returns the folder, and the outputs of the two processes.
    """
    folder = processes.folder
    texts = folder / 'texts.txt'
    texts.write_text('\n'.join(processes.lines[:20]) + '\n')
    mixed = folder / 'mixed.gin'
    mixed.write_text(MIXED)

    def commands(name):
        return [finetune(folder / name / 'mixed', str(mixed)), train(folder / name / 'feed_forward', **LONG)]

    def evaluation_commands(name):
        checkpoint = f'--checkpoint={folder / "alone" / "feed_forward"}'
        evaluate = ['eval', checkpoint, *model_flags(), '--gin.EVAL_BATCH_SIZE=16']
        infer = ['infer', checkpoint, *model_flags(), '--gin.INFER_BATCH_SIZE=8', f'--input={texts}']
        vocabulary = ['--gin_file=' + str(_vocabulary_gin(folder)), f'--output={folder / name / "answers.jsonl"}']
        return [[*evaluate, f'--output={folder / name / "eval"}'], [*infer, *vocabulary]]

    def copy_first_half(name):
        copy_until(folder / name / 'feed_forward', folder / RESUMED[name], 2)

    _check_success(processes.run(*alone(*commands('alone'), *evaluation_commands('alone'))))
    copy_first_half('alone')
    resumed = [train(folder / RESUMED['alone'], **LONG), *evaluation_commands('together')]
    outputs = _check_success(processes.run(*pair(*commands('together'), *resumed)))
    copy_first_half('together')
    _check_success(processes.run(*alone(train(folder / RESUMED['together'], **LONG))))
    return folder, [output for _, output in outputs]


def _check_success(results):
    for code, output in results:
        assert code == 0, output[-3000:]
    return results


def _vocabulary_gin(folder):
    path = folder / 'vocabulary.gin'
    path.write_text(
        'from __gin__ import dynamic_registration\nimport seqio\nVOCABULARY = @seqio.ByteVocabulary()\n'
        'seqio.ByteVocabulary.extra_ids = 0\n'
    )
    return path


def test_two_processes_train_like_one_device(runs):
    """The data is not shuffled, so that batches contain the same rows."""
    ours, theirs = (losses(runs[0] / name / 'mixed') for name in ('together', 'alone'))
    assert len(ours) == 2
    assert_close(ours, theirs)


def test_a_run_resumes_with_another_number_of_processes(runs):
    """The data is shuffled."""
    folder = runs[0]
    assert_close(losses(folder / RESUMED['together']), losses(folder / 'together' / 'feed_forward'))
    assert_close(losses(folder / RESUMED['alone']), losses(folder / 'alone' / 'feed_forward'))
    # The order of the data depends on the number of streams, so the two runs differ.
    assert losses(folder / 'together' / 'feed_forward')[4] != losses(folder / 'alone' / 'feed_forward')[4]


def test_finetuning_saves_the_best_parameters(runs):
    evaluated = set()
    for name in ('together', 'alone'):
        folder = runs[0] / name / 'mixed'
        (record,) = [row for row in rows(folder / 'metrics.jsonl') if row['kind'] == 'eval/lines']
        best = json.loads((folder / 'best' / 'lines' / '2' / 'run' / 'metadata').read_text())['best']
        evaluated.add(best.pop('evaluated'))
        assert best == {'task': 'lines', 'metric': 'exact', 'value': record['exact'], 'step': 2}
    # The hash of the evaluated examples does not depend on the number of processes.
    assert len(evaluated) == 1


def test_finetuning_has_the_same_held_out_loss(runs):
    ours, theirs = (
        [row for row in rows(runs[0] / name / 'mixed' / 'metrics.jsonl') if row['kind'].startswith('held_out')]
        for name in ('together', 'alone')
    )
    token_counts = [[(row['kind'], row['step'], row['tokens']) for row in records] for records in (ours, theirs)]
    assert token_counts[0] == token_counts[1] == [('held_out/lines', 2, token_counts[0][0][2])], token_counts
    assert token_counts[0][0][2] > 0
    np.testing.assert_allclose(ours[0]['loss'], theirs[0]['loss'], rtol=2e-4)


def test_eval_and_infer_do_not_depend_on_the_number_of_processes(runs):
    folder = runs[0]
    ours, theirs = (rows(folder / name / 'eval' / 'metrics.jsonl') for name in ('together', 'alone'))
    assert [row['exact'] for row in ours] == [row['exact'] for row in theirs] and len(ours) == 1
    ours, theirs = (rows(folder / name / 'answers.jsonl') for name in ('together', 'alone'))
    assert [row['prediction'] for row in ours] == [row['prediction'] for row in theirs] and len(ours) == 20
    np.testing.assert_allclose([row['score'] for row in ours], [row['score'] for row in theirs], rtol=1e-4)


def without_gloo(output):
    """Removes the lines of Gloo, whose threads interleave their output."""
    fragments = r'\[Gloo\] Rank |is connected to|peer ranks\.|Expected number of connected peer ranks is :'
    return [line for line in output.splitlines() if re.sub(rf'{fragments}|\d+|\s', '', line)]


def test_only_the_first_process_prints(runs):
    first, second = runs[1]
    assert 'finished at step 2' in first and 'parameters' in first
    assert not without_gloo(second)


def test_sigterm_of_one_process_stops_all_and_a_kill_aborts_all(processes):
    folder = processes.folder / 'endless'
    endless = train(folder, TRAIN_STEPS=10**6, CHECKPOINT_PERIOD=10**6)
    first, second = processes.start(*pair_by_flags(endless))
    first.wait_until(lambda: last_step(folder) >= 3, 'step 3')
    second.send(signal.SIGTERM)
    result = wait_for([first, second])
    saved = [int(path.name) for path in (folder / 'checkpoints').iterdir()]
    assert [code for code, _ in result] == [143, 143], result
    assert f'stopped by SIGTERM and saved at step {saved[0]}' in result[0][1] and len(saved) == 1

    first, second = processes.start(*pair_by_flags(endless))
    first.wait_until(lambda: last_step(folder) >= saved[0] + 3, 'three more steps')
    second.send(signal.SIGKILL)
    # JAX aborts the first process after HEARTBEAT seconds, and logs the reason.
    (code, output), (killed, _) = wait_for([first, second])
    assert (code, killed) == (-signal.SIGABRT, -9)
    assert 'another task died' in output
    assert [int(path.name) for path in (folder / 'checkpoints').iterdir() if path.name.isdigit()] == saved


def test_a_run_that_is_stopped_in_an_evaluation_ends_bit_identical(runs, processes):
    """Each evaluation has six batches, and process 1 receives the signal before the third batch."""
    command = train(processes.folder / 'stopped', **LONG)
    function = lines_worker.work_until_signal
    outputs = wait_for(processes.start(*pair_by_flags(command), function=function, arguments=(3,)))
    assert [code for code, _ in outputs] == [143, 143], outputs
    _check_success(processes.run(*pair_by_flags(command)))
    assert difference(processes.folder / 'stopped', runs[0] / 'together' / 'feed_forward', 4) is None


def test_an_error_in_one_process_ends_all_with_its_message(processes):
    command = train(processes.folder / 'mistaken')
    (first_code, first), (second_code, second) = processes.run(
        *pair_by_flags(command, [], [f'--gin.MODEL_DIR={processes.folder / "elsewhere"}'])
    )
    assert (first_code, second_code) == (2, 2)
    assert 'error (process 1): MODEL_DIR' in second and 'elsewhere, which is a different folder' in second
    assert 'error (process 0): process 1 has failed: MODEL_DIR' in first


def test_failures_of_other_processes_are_reported_until_all_have_finished(monkeypatch):
    calls = mock.Mock()
    monkeypatch.setattr(distributed, '_connect_process', calls.connect)
    monkeypatch.setattr(collectives, 'FailureWatcher', lambda *arguments: calls.watcher)
    monkeypatch.setattr('jax.distributed.shutdown', calls.shutdown)
    with distributed.connect_processes(BY_HAND, main.report_error):
        calls.run()
    assert [call[0] for call in calls.mock_calls] == ['connect', 'run', 'shutdown', 'watcher.close']


def raise_connection_error(*arguments, **options):
    raise jax.errors.JaxRuntimeError('INTERNAL: Gloo context initialization failed: Connect timeout')


def test_a_lost_connection_is_not_reported_as_a_user_error(monkeypatch, tmp_path, capsys):
    """Neither when checkpoints are opened nor when they are saved. Launch scripts restart a run that exits with 134."""
    calls = mock.Mock()
    monkeypatch.setattr(distributed, '_connect_process', calls.connect)
    monkeypatch.setattr(collectives, 'FailureWatcher', lambda *arguments: calls.watcher)
    monkeypatch.setattr(collectives, 'exit_process', calls.exit)
    checkpoints = checkpoint_manager.RunCheckpoints(model_dir.create_model_dir(tmp_path / 'run'))
    monkeypatch.setattr(collectives, 'is_distributed', lambda: True)
    monkeypatch.setattr(collectives, 'barrier', calls.barrier)
    checkpoints._manager = mock.Mock(save=raise_connection_error)
    monkeypatch.setattr('orbax.checkpoint.CheckpointManager', raise_connection_error)
    for action in (checkpoints._open_manager, lambda: checkpoints.save(1, {}, DataPosition(), {})):
        with distributed.connect_processes(BY_HAND, main.report_error):
            action()
        calls.watcher.report_failure.assert_called_with(134, mock.ANY)
        calls.exit.assert_called_with(134)
        assert 'error (process 1): the connection to another process failed' in capsys.readouterr().err


def test_processes_compare_settings_versions_environment_and_code(tmp_path):
    flags = [('FILES', 'x.txt'), ('MODEL_DIR', 'x'), ('SEED', '1')]
    join = {'address': f'127.0.0.1:{ports.reserve()}', 'count': 2}
    environment = {**paths.environment(), 'XLA_FLAGS': '', 'JAX_ENABLE_X64': '0'}
    arguments = [(['experiments/own_text.gin'], flags, {**join, 'index': index}) for index in (0, 1)]
    started = [
        Process(lines_worker.compare_identities, *values, output=tmp_path / f'{index}', environment=environment)
        for index, values in enumerate(arguments)
    ]
    outputs = [
        [line for line in output.splitlines() if line.startswith('[')]
        for _, output in _check_success(wait_for(started))
    ]
    outputs = [[line for line in lines if not line.startswith('[Gloo]')] for lines in outputs]
    assert outputs[0] == outputs[1]
    compared = {name: (value, error) for name, value, error in map(json.loads, outputs[0])}
    assert compared.pop('null', None) is None and compared.pop(None)[1] is None
    for name, (value, error) in compared.items():
        assert name in error and str(value)[:20] in error and 'changed' in error and '\n' not in error
    for name in ('LEARNING_RATE', 'BATCH_SIZE', 'TRAIN_STEPS', 'EVAL_PERIOD', 'FILES', 'SEED', 'the command'):
        assert name in compared, compared.keys()
    for name in ('version of jax', 'XLA_FLAGS', 'the code of remixer_t5x', f'the code of {lines_worker.__name__}'):
        assert name in compared, compared.keys()
    assert not {*process_flags.MAY_DIFFER} & compared.keys()


def test_processes_that_differ_are_rejected(runs, processes, tmp_path):
    """The processes have different working directories, and read files by the same relative names."""
    folders = [tmp_path / 'first', tmp_path / 'second']
    for folder, run in zip(folders, ('alone', 'together'), strict=True):
        folder.mkdir()
        words = [base64.b32encode(f'{run}{index**5}'.encode()).decode()[index % 9 :] for index in range(300)]
        (folder / 'text.txt').write_text('\n'.join(' '.join(words[index:]) for index in range(250)))
        (folder / 'checkpoint').symlink_to(processes.folder / run / 'feed_forward')
    own_text = [word for word in train(tmp_path / 'run') if 'MIXTURE_OR_TASK_NAME' not in word]
    own_text += ['--gin_file=data/own_text.gin', '--gin.TXT_DOCUMENTS=line', '--gin.FILES=text.txt']
    infer = ['infer', '--checkpoint=checkpoint', *model_flags(), f'--gin_file={_vocabulary_gin(tmp_path)}']
    commands = {
        'the vocabulary for training': [*own_text, '--gin.VOCAB_SIZE=384'],
        'the data for training': [*own_text, '--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384'],
        'the checkpoint': train(tmp_path / 'initialized', INITIAL_CHECKPOINT_PATH='checkpoint'),
        'the texts of INPUT': [*infer, '--gin.INFER_BATCH_SIZE=8', '--input=text.txt', '--output=answers.jsonl'],
    }
    started = processes.start(*pair(*commands.values()), folders=folders, function=lines_worker.work_rejected)
    for _, output in _check_success(wait_for(started)):
        errors = [line for line in without_gloo(output) if line.startswith('error')]
        for line, named in zip(errors, commands, strict=True):
            assert line.startswith(f'error: {named}') and 'in process 0 and' in line, output
    assert not (tmp_path / 'run').exists()


def test_processes_with_different_numbers_of_devices_are_rejected(processes, tmp_path):
    first, second = pair_by_flags(train(tmp_path / 'run'))
    for index, (code, output) in enumerate(processes.run(first, (2, *second[1:]))):
        (line,) = [line for line in without_gloo(output) if line.startswith('error')]
        assert code == 2 and line.startswith(f'error (process {index}): the devices of a process'), output


def test_a_missing_process_aborts_the_run_after_the_timeout(processes):
    first = pair_by_flags(train(processes.folder / 'lonely'), ['--initialization_timeout=2'], [])[:1]
    ((code, output),) = processes.run(*first)
    assert code == -signal.SIGABRT
    assert 'process 0 waits up to 2 s for 2 processes at 127.0.0.1:' in output


SLURM = {
    'SLURM_JOB_ID': '4096',
    'SLURM_STEP_NODELIST': 'node[3-4]',
    'SLURM_NTASKS': '2',
    'SLURM_PROCID': '1',
    'SLURM_LOCALID': '0',
    'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
}
MPI = {
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
    'OMPI_COMM_WORLD_SIZE': '16',
    'OMPI_COMM_WORLD_RANK': '9',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '8',
}
BY_HAND = distributed.ProcessFlags('node1:8476', 2, 1)


@pytest.mark.parametrize(
    ('environment', 'settings', 'expected'),
    [
        ({}, distributed.ProcessFlags(), None),
        ({}, BY_HAND, distributed.DistributedConfig('node1:8476', 2, 1)),
        (
            {'JAX_COORDINATOR_ADDRESS': 'node1:8476', 'JAX_NUM_PROCESSES': '3', 'JAX_PROCESS_ID': '0'},
            distributed.ProcessFlags(index=2),
            distributed.DistributedConfig('node1:8476', 3, 2),
        ),
        # A single process per machine uses all devices; one of several processes uses one device.
        (SLURM, distributed.ProcessFlags(), distributed.DistributedConfig('node3:61440', 2, 1, None)),
        (SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, distributed.ProcessFlags(), None),
        (SLURM, BY_HAND, distributed.DistributedConfig('node1:8476', 2, 1)),
        (MPI, distributed.ProcessFlags(), distributed.DistributedConfig('10.96.0.1:62624', 16, 9, (1,))),
        (
            MPI | {'CUDA_VISIBLE_DEVICES': '1'},
            distributed.ProcessFlags(),
            distributed.DistributedConfig('10.96.0.1:62624', 16, 9),
        ),
        # A pod without an index.
        ({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}, distributed.ProcessFlags(), None),
    ],
)
def test_the_index_of_a_process_is_found_in_the_environment(monkeypatch, environment, settings, expected):
    for name in [name for name in os.environ if name.startswith(('SLURM', 'OMPI', 'JAX_COORD', 'KUBERNETES'))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed.resolve_distributed_config(settings) == expected


@pytest.mark.parametrize('command', [['train', '--from_hf=/missing'], ['infer', '--embed', '--output=missing']])
def test_commands_for_one_process_are_rejected_in_several(command, monkeypatch, capsys):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    errors = []
    for flags in ([], ['--process_count=1']):
        assert main.main([*command, *flags]) == 2
        errors.append(capsys.readouterr().err)
    assert 'must be used in one process' in errors[0]
    assert 'process' not in errors[1]


@pytest.mark.parametrize(
    ('settings', 'environment', 'words'),
    [
        (('node1:8476',), {}, '--process_count=N --process_index=I'),
        (('node1:8476', 2, 2), {}, 'from 0 to 1, got 2'),
        (('node1', 2, 1), {}, '--coordinator_address=node1:8476'),
        ((), {'JAX_NUM_PROCESSES': 'two'}, "JAX_NUM_PROCESSES must be a whole number, got 'two'; pass --coordinator_"),
    ],
)
def test_invalid_process_flags_raise_a_one_line_error(settings, environment, words):
    with pytest.raises(UserError) as error:
        distributed.resolve_distributed_config(distributed.ProcessFlags(*settings), environment)
    assert words in str(error.value) and '\n' not in str(error.value)
