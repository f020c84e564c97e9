"""`remixer-t5x convert` with Hugging Face folders and safetensors."""

import json
import os
import shutil
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.interop import converted_checkpoint, safetensors_files
from remixer_t5x.interop.huggingface import model_folders
from tests.support import command_folder, hf_folders


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with a sharded T5 v1.0 in `hf` and the converted model in `ours`."""
    with command_folder.working_directory(tmp_path_factory.mktemp('convert')) as folder:
        hf_folders.write_tiny(folder / 'hf', 't5_v1_0_tiny', shards=2)
        assert main(['convert', '--from_hf=hf', '--to=ours']) == 0
        yield folder


def convert_error(capsys, *argv):
    assert main(['convert', *argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ')
    return lines[0]


def write_bert(folder):
    hf_folders.write_tiny(folder, 'bert_tiny')
    (folder / 'vocab.txt').write_text(
        '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'text', '##s', 'of'])
    )
    return folder


# tests/cli/test_hub.py pushes and loads a T5.
@pytest.mark.usefixtures('clean_gin')
@pytest.mark.parametrize(('name', 'write'), [('bert_tiny', write_bert), ('gpt2_tiny', hf_folders.write_gpt2)])
def test_a_folder_becomes_a_model_dir_and_a_folder_again(name, write, tmp_path, capsys):
    theirs, ours, back = write(tmp_path / 'theirs'), tmp_path / 'ours', tmp_path / 'back'
    assert main(['convert', f'--from_hf={theirs}', f'--to={ours}']) == 0
    assert 'all weights in the output equal those in the input' in capsys.readouterr().out
    assert main(['convert', f'--gin_file={ours}/model.gin', f'--checkpoint={ours}', f'--to_hf={back}']) == 0
    out = capsys.readouterr().out
    assert 'all weights, read back from the output, equal those written' in out
    if model_folders.find_missing_packages():
        assert 'logits are not compared' in out and 'remixer-t5x[hf]' in out
    else:
        assert "logits of Hugging Face's model and ours differ by" in out
    jax.tree.map(np.testing.assert_array_equal, load_file(back / 'model.safetensors'), hf_folders.weights(name))
    settings = hf_folders.CONFIGS[name].items()
    assert settings <= json.loads((back / 'config.json').read_text()).items()
    loaded, *others = [remixer_t5x.load(str(path)) for path in (theirs, ours, back)]
    assert loaded.lengths == ({'inputs': 20, 'targets': 20} if name == 'bert_tiny' else loaded.lengths)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, loaded.params, other.params)
        assert other.lengths == loaded.lengths and other.vocabulary.eos_id == loaded.vocabulary.eos_id
        assert list(other.vocabulary.encode('a text of it')) == list(loaded.vocabulary.encode('a text of it'))


def test_a_missing_library_or_vocabulary_raises_a_one_line_error(tmp_path, capsys, monkeypatch):
    folder = write_bert(tmp_path / 'bert')
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    command = [f'--from_hf={folder}', f'--to={tmp_path}/ours']
    assert "pip install 'remixer-t5x[tokenizers]'" in convert_error(capsys, *command)
    (folder / 'vocab.txt').unlink()
    assert 'has no tokenizer.json and no vocab.txt; pass vocabulary' in convert_error(capsys, *command)


@pytest.mark.usefixtures('current_folder')
def test_a_converted_checkpoint_records_its_model_and_becomes_bfloat16():
    """`test_adapters.py` finetunes a converted checkpoint."""
    _, record, step = converted_checkpoint.read_checkpoint('ours')
    assert step == 0 and record['vocabulary'].endswith('of 36 ids') and 'VOCAB_SIZE = 64' in record['config']
    argv = ['--gin_file=ours/model.gin', '--checkpoint=ours', '--to_hf=half', '--dtype=bfloat16']
    assert main(['convert', *argv]) == 0
    before, after = load_file('hf/model-00001-of-00002.safetensors'), load_file('half/model.safetensors')
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array.astype(after[name].dtype))
    assert {array.dtype.name for array in after.values()} == {'bfloat16'}


def test_safetensors_survive_a_round_trip(current_folder, capsys):
    file, again = 'plain.v1', 'plain.v1_again'
    assert main(['convert', '--checkpoint=ours', f'--to_safetensors={file}']) == 0
    assert main(['convert', f'--from_safetensors={file}', f'--to={again}']) == 0
    assert capsys.readouterr().out.count('bit-identical') == 2
    for piece in (current_folder / 'ours/vocabulary').iterdir():
        assert (current_folder / again / 'vocabulary' / piece.name).read_bytes() == piece.read_bytes()
    first, second = converted_checkpoint.read_checkpoint('ours'), converted_checkpoint.read_checkpoint(again)
    assert safetensors_files.find_differing_array(first[0], second[0]) is None
    assert second[1]['vocabulary'] == first[1]['vocabulary'] and second[2] == first[2]
    assert (current_folder / again / 'config.gin').read_text() == first[1]['config']
    # The command checks that the parameters are only rounded.
    assert main(['convert', '--checkpoint=ours', '--to_safetensors=low.safetensors', '--dtype=bfloat16']) == 0
    assert {array.dtype.name for array in load_file('low.safetensors').values()} == {'bfloat16'}
    assert (current_folder / 'low.vocabulary').is_dir()
    # Other users can read the file if the umask permits it.
    (current_folder / 'ordinary').touch()
    modes = {os.stat(name).st_mode for name in (file, 'ordinary')}
    assert len(modes) == 1
    shutil.rmtree('plain.v1.vocabulary')
    assert main(['convert', f'--from_safetensors={file}', f'--to={file}_alone']) == 0
    assert 'plain.v1.vocabulary' in capsys.readouterr().out


def test_the_average_of_checkpoints_is_their_mean(current_folder, capsys):
    params, record, _ = converted_checkpoint.read_checkpoint('ours')
    trees = [params]
    for step in (3, 7):
        trees.append(jax.tree.map(lambda array, step=step: array * np.float32(step) + np.float32(0.1), params))
        converted_checkpoint.write_checkpoint(
            converted_checkpoint.create_model_dir(f'copy_{step}'), trees[-1], step, record
        )
    assert main(['convert', '--average=ours, copy_3,copy_7/checkpoints/7', '--to=mean']) == 0
    mean, _, step = converted_checkpoint.read_checkpoint('mean')
    expected = jax.tree.map(lambda *arrays: np.mean(np.stack(arrays), axis=0, dtype=np.float32), *trees)
    assert safetensors_files.find_differing_array(mean, expected) is None and step == 7
    assert (current_folder / 'mean/vocabulary/vocabulary.json').exists()
    converted_checkpoint.write_checkpoint(
        converted_checkpoint.create_model_dir('wider'), {'logits': {'kernel': np.ones((3, 3), np.float32)}}, 0, record
    )
    message = convert_error(capsys, '--average=ours,wider', '--to=x')
    assert 'ours/checkpoints/0' in message and 'wider/checkpoints/0' in message and 'params/' in message
    # The average of checkpoints that contain only what differs from a base is complete.
    assert main(['convert', '--checkpoint=copy_3', '--base=ours', '--to_adapters=small']) == 0
    assert main(['convert', '--average=small,copy_3', '--to=merged']) == 0
    merged, _, _ = converted_checkpoint.read_checkpoint('merged')
    assert safetensors_files.find_differing_array(merged, trees[1]) is None


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (('--checkpoint=ours', '--to=hf'), 'hf already exists'),
        (('--average=ours,ours', '--to=ours'), 'ours already exists'),
        (('--checkpoint=ours', '--to_safetensors=hf/config.json'), 'config.json already exists'),
        (('--checkpoint=ours', '--to_safetensors=old.safetensors'), 'old.vocabulary already exists'),
        (('--gin_file=ours/model.gin', '--checkpoint=ours', '--to_t5x=t5x'), 'checkpoint_0 already exists'),
    ],
)  # fmt: skip
def test_an_existing_output_is_refused_before_the_input_is_read(current_folder, capsys, argv, message, monkeypatch):
    for folder in ('t5x/checkpoint_0', 'old.vocabulary/pieces'):
        (current_folder / folder).mkdir(parents=True, exist_ok=True)
    for name in ('converted_checkpoint.read_checkpoint', 'safetensors_files.read_params'):
        monkeypatch.setattr(f'remixer_t5x.interop.{name}', None)
    monkeypatch.setattr('remixer_t5x.checkpoints.saved_params.restore_params', None)
    assert message in convert_error(capsys, *argv)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (('--from_hf=hf', '--to_hf=x'), '--from_hf must be combined with --to, got --to_hf'),
        (('--gin_file=ours/model.gin', '--checkpoint=ours', '--to_hf=/proc/x'), '/proc/x cannot be written'),
        (('--from_hf=google/t5', '--to=x'), 'google/t5 cannot be downloaded'),
        (('--gin_file=ours/model.gin', '--checkpoint=ours', '--to_hf=x', '--gin.MLP_DIM=8'), 'relu_mlp'),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_a_one_line_error(current_folder, capsys, argv, message, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert message in convert_error(capsys, *argv)
    assert not (current_folder / 'x').exists()
