"""A mixer, or adapters, in the T5 of a Hugging Face folder, finetuned alone by one command; adapters apart from it."""

import json
import os
import shutil

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.convert import huggingface
from remixer_t5x.cli.main import main
from tests.support import command_folder, compare_runs, hf_folders

BASE = ['--gin_file=experiments/finetune_pairs.gin', '--from_hf=t5', '--gin.PAIRS=rows.jsonl']
BASE += ["--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 6}", '--gin.BATCH_SIZE=4', '--gin.EVAL_PERIOD=None']
BASE += ['--gin.LOG_PERIOD=1', '--gin.CHECKPOINT_PERIOD=2', '--gin.WARMUP_STEPS=1', '--gin.DROPOUT_RATE=0.0']
GRAFT = ['--gin_file=sublayers/hyper_mixer.gin', '--gin.HYPER_MIXER_DIM=16', '--gin.ENCODER_POSITION_BIAS=None']
GRAFT += ['--gin.ENCODER_MIXER=@encoder/hyper_mixer.HyperMixer', '--gin.TRAINABLE=hyper_mixer']
LORA = ['--gin.LORA=query|value', '--gin.LORA_RANK=2', '--gin.MODEL_DIR=adapted', '--gin.TRAIN_STEPS_RELATIVE=4']
TEXTS = ['the this is', 'a test']


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """The current folder, with a Hugging Face T5 in `t5` and labelled rows."""
    rows = [{'inputs': f'this is {i}', 'targets': 'a test'} for i in range(40)]
    with command_folder.entered(tmp_path_factory.mktemp('adapters')) as folder:
        hf_folders.write_tiny(folder / 't5', 't5_v1_1_tiny')
        (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        yield folder


@pytest.fixture(scope='module')
def adapted(place):
    assert main(['finetune', *BASE, *LORA]) == 0
    return place / 'adapted'


def params(folder, step):
    found = compare_runs.arrays(folder, step)
    return {name.removeprefix('params/'): array for name, array in found.items() if name.startswith('params/')}


def score(path):
    return remixer_t5x.load(str(path), lengths={'inputs': 24, 'targets': 24}).score(TEXTS, TEXTS)


def test_a_mixer_is_inserted_into_a_pretrained_model_and_trained_alone(place, capsys):
    command = ['finetune', *BASE, *GRAFT, '--gin.MODEL_DIR=grafted', '--gin.TRAIN_STEPS_RELATIVE=2']
    assert main(command) == 2
    assert 'does not fit this model: encoder/' in capsys.readouterr().err
    assert main([*command, '--gin.FRESH_PARAMETERS=hyper_mixer']) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    places = {kind: [line[1] for line in lines if line[:1] == [kind]] for kind in ('taken', 'fresh', 'left')}
    attention = {f'encoder/run_0/layer/self_attention{end}' for end in ('', '_norm')}
    assert set(places['left']) == {*attention, 'encoder/position_bias'}
    assert set(places['fresh']) == {f'encoder/run_0/layer/hyper_mixer{end}' for end in ('', '_norm')}
    assert 'decoder' in places['taken'] and 'encoder/run_0/layer/gated_mlp' in places['taken']
    weights = hf_folders.weights('t5_v1_1_tiny')
    ours = params('grafted', 2)
    np.testing.assert_array_equal(ours['token_embedder/embedding'], weights['shared.weight'])
    theirs = [weights[f'encoder.block.{layer}.layer.1.DenseReluDense.wo.weight'].T for layer in range(2)]
    np.testing.assert_array_equal(ours['encoder/run_0/layer/gated_mlp/wo/kernel'], np.stack(theirs))
    state = [name for name in compare_runs.arrays('grafted', 2) if name.startswith('opt_state') and 'kernel' in name]
    assert state and all('hyper_mixer' in name for name in state)
    assert np.isfinite(score('grafted')).all()


def test_a_run_with_adapters_resumes_bit_for_bit(adapted, place):
    shutil.copytree(adapted, place / 'resumed')
    shutil.rmtree(place / 'resumed/checkpoints/4')
    assert main(['finetune', *BASE, *LORA, '--gin.MODEL_DIR=resumed']) == 0
    ours, theirs = compare_runs.arrays('resumed', 4), compare_runs.arrays(adapted, 4)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, name)
    moved = {name for name, array in params(adapted, 4).items() if not np.array_equal(array, params(adapted, 2)[name])}
    assert moved == theirs_adapters(theirs) and len(moved) == 12


def theirs_adapters(arrays):
    names = (name.removeprefix('params/') for name in arrays if name.startswith('params/'))
    return {name for name in names if '/lora_' in name}


def test_adapters_are_a_small_checkpoint_on_top_of_their_base(adapted, place, capsys):
    wanted = score(adapted)
    assert main(['convert', '--checkpoint=adapted', '--to_adapters=small']) == 0
    assert set(params('small', 4)) == theirs_adapters(compare_runs.arrays(adapted, 4))
    np.testing.assert_array_equal(score('small'), wanted)
    # Merged, as a checkpoint and as Hugging Face's T5.
    assert main(['convert', '--checkpoint=small', '--to=merged']) == 0
    np.testing.assert_array_equal(score('merged'), wanted)
    assert not [name for name in params('merged', 4) if '/lora_' in name]
    assert main(['convert', '--gin_file=adapted/config.gin', '--checkpoint=small', '--to_hf=hf']) == 0
    np.testing.assert_allclose(score('hf'), wanted, rtol=1e-5)
    assert np.abs(score('t5') - wanted).max() > 1e-4
    infer = ['infer', '--gin_file=adapted/config.gin', '--input=t.txt', '--output=o.jsonl', '--checkpoint=small']
    (place / 't.txt').write_text('\n'.join(TEXTS))
    assert main(infer) == 0 and len((place / 'o.jsonl').read_text().splitlines()) == 2
    # Adapters move with their base, and refuse another one.
    base = (place / 'small/base.txt').read_text().strip()
    shutil.copytree(os.path.dirname(os.path.dirname(base)), place / 'elsewhere')
    (place / 'small/base.txt').write_text('../elsewhere\n')
    np.testing.assert_array_equal(score('small'), wanted)
    for text, words in (('../adapted', 'is not the base of the adapters'), ('', 'write the path of the base'),
                        ('/nowhere', 'base.txt refers to a base checkpoint, but /nowhere does not')):  # fmt: skip
        (place / 'small/base.txt').write_text(text)
        with pytest.raises(remixer_t5x.UserError, match=words):
            score('small')


def test_unsupported_requests_raise_a_one_line_error(place, capsys):
    base = huggingface.cached_model_dir('t5')
    assert main(['convert', f'--checkpoint={base}', '--to_adapters=none', f'--base={base}']) == 2
    assert 'so there is nothing to write' in capsys.readouterr().err
    assert main(['convert', f'--checkpoint={base}', '--to_adapters=none']) == 2
    assert 'type --base=PATH' in capsys.readouterr().err
    assert main(['finetune', *BASE, '--from_hf=no/such/folder', '--gin.MODEL_DIR=x']) == 2
    assert 'no/such/folder is not a folder' in capsys.readouterr().err
