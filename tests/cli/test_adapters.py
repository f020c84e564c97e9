"""Finetuning only a new mixer or LoRA adapters in a T5 of a Hugging Face folder, and checkpoints of adapters."""

import json
import shutil

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.devices import chips
from tests.support import command_folder, compare_runs, hf_folders

BASE = ['--gin_file=experiments/finetune_pairs.gin', '--from_hf=t5', '--gin.PAIRS=rows.jsonl']
BASE += ["--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 6}", '--gin.BATCH_SIZE=4', '--gin.EVAL_PERIOD=None']
BASE += ['--gin.LOG_PERIOD=1', '--gin.CHECKPOINT_PERIOD=2', '--gin.WARMUP_STEPS=1', '--gin.DROPOUT_RATE=0.0']
GRAFT = ['--gin_file=sublayers/hyper_mixer.gin', '--gin.HYPER_MIXER_DIM=16', '--gin.ENCODER_POSITION_BIAS=None']
GRAFT += ['--gin.ENCODER_MIXER=@encoder/hyper_mixer.HyperMixer', '--gin.TRAINABLE=hyper_mixer']
LORA = ['--gin.LORA=query|value', '--gin.LORA_RANK=2', '--gin.MODEL_DIR=adapted', '--gin.TRAIN_STEPS_RELATIVE=4']
TEXTS = ['the this is', 'a test']


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with a Hugging Face T5 in `t5` and labelled rows."""
    rows = [{'inputs': f'this is {i}', 'targets': 'a test'} for i in range(40)]
    with command_folder.working_directory(tmp_path_factory.mktemp('adapters')) as folder:
        hf_folders.write_tiny(folder / 't5', 't5_v1_1_tiny')
        (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        yield folder


@pytest.fixture(scope='module')
def adapted(current_folder):
    assert main(['finetune', *BASE, *LORA]) == 0
    return current_folder / 'adapted'


def params(folder, step):
    arrays = compare_runs.checkpoint_arrays(folder, step)
    return {name.removeprefix('params/'): array for name, array in arrays.items() if name.startswith('params/')}


def score(path):
    return remixer_t5x.load(str(path), lengths={'inputs': 24, 'targets': 24}).score(TEXTS, TEXTS)


def test_a_mixer_is_inserted_into_a_pretrained_model_and_trained_alone(current_folder, capsys, monkeypatch):
    monkeypatch.setattr(chips, 'get_peak_flops', lambda device_kind: 1e12)
    command = ['finetune', *BASE, *GRAFT, '--gin.MODEL_DIR=grafted', '--gin.TRAIN_STEPS_RELATIVE=2']
    command.append('--gin.FRESH_PARAMETERS=hyper_mixer')
    assert main(command) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    modules = {kind: [line[1] for line in lines if line[:1] == [kind]] for kind in ('fresh', 'unused')}
    attention = {f'encoder/run_0/layer/self_attention{end}' for end in ('', '_norm')}
    assert {*attention} < set(modules['unused'])
    assert set(modules['fresh']) == {f'encoder/run_0/layer/hyper_mixer{end}' for end in ('', '_norm')}
    weights = hf_folders.weights('t5_v1_1_tiny')
    ours = params('grafted', 2)
    np.testing.assert_array_equal(ours['token_embedder/embedding'], weights['shared.weight'])
    theirs = [weights[f'encoder.block.{layer}.layer.1.DenseReluDense.wo.weight'].T for layer in range(2)]
    np.testing.assert_array_equal(ours['encoder/run_0/layer/gated_mlp/wo/kernel'], np.stack(theirs))
    names = compare_runs.checkpoint_arrays('grafted', 2)
    state = [name for name in names if name.startswith('opt_state') and 'kernel' in name]
    assert state and all('hyper_mixer' in name for name in state)
    # The small checkpoint omits the base's self-attention, which the model does not have.
    assert main(['convert', '--checkpoint=grafted', '--to_adapters=small_graft']) == 0
    assert all('hyper_mixer' in name for name in params('small_graft', 2))
    grafted = score('grafted')
    assert np.isfinite(grafted).all()
    np.testing.assert_array_equal(score('small_graft'), grafted)
    # The counted FLOPs include the gradients of frozen parameters.
    log = (current_folder / 'grafted/metrics.jsonl').read_text()
    assert 'seconds_per_step' in log and 'mfu' not in log


def test_a_run_with_adapters_resumes_bit_for_bit(adapted, current_folder):
    shutil.copytree(adapted, current_folder / 'resumed')
    shutil.rmtree(current_folder / 'resumed/checkpoints/4')
    assert main(['finetune', *BASE, *LORA, '--gin.MODEL_DIR=resumed']) == 0
    ours, theirs = compare_runs.checkpoint_arrays('resumed', 4), compare_runs.checkpoint_arrays(adapted, 4)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, name)
    moved = {name for name, array in params(adapted, 4).items() if not np.array_equal(array, params(adapted, 2)[name])}
    assert moved == adapter_names(theirs) and len(moved) == 12


def adapter_names(arrays):
    names = (name.removeprefix('params/') for name in arrays if name.startswith('params/'))
    return {name for name in names if '/lora_' in name}


def test_adapters_are_a_small_checkpoint_on_top_of_their_base(adapted, current_folder, capsys):
    expected = score(adapted)
    assert main(['convert', '--checkpoint=adapted', '--to_adapters=small']) == 0
    assert set(params('small', 4)) == adapter_names(compare_runs.checkpoint_arrays(adapted, 4))
    np.testing.assert_array_equal(score('small'), expected)
    # Adapters are merged into a checkpoint.
    assert main(['convert', '--checkpoint=small', '--to=merged']) == 0
    np.testing.assert_array_equal(score('merged'), expected)
    assert not [name for name in params('merged', 4) if '/lora_' in name]
    infer = ['infer', '--gin_file=adapted/config.gin', '--input=t.txt', '--output=o.jsonl', '--checkpoint=small']
    (current_folder / 't.txt').write_text('\n'.join(TEXTS))
    assert main(infer) == 0 and len((current_folder / 'o.jsonl').read_text().splitlines()) == 2
    # A base that was removed with the cache is converted again. Adapters reject another base.
    file = current_folder / 'small/base.txt'
    file.write_text('removed')
    with pytest.raises(remixer_t5x.UserError, match='removed does not contain a checkpoint') as caught:
        score('small')
    assert f'convert --from_hf={current_folder / "t5"} --to=' in str(caught.value) and str(file) in str(caught.value)
    assert main(['convert', '--from_hf=t5', '--to=base_again']) == 0
    file.write_text('../base_again\n')
    np.testing.assert_array_equal(score('small'), expected)
    file.write_text('../adapted')
    with pytest.raises(remixer_t5x.UserError, match='is not the base checkpoint of the adapters'):
        score('small')
