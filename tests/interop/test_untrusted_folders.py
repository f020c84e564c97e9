"""Untrusted Hugging Face folders and safetensors files are read or raise an error of one line."""

import json
import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import model_folders
from remixer_t5x.interop.huggingface.model_family import MAX_NUMBER, HuggingFaceConfig
from remixer_t5x.interop.huggingface.modern_bert import ModernBert
from tests.support import hf_folders
from tests.support.error_lines import error_message

GOOD = {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.ones(4, np.float16)}
FUZZ = settings(max_examples=100, deadline=None)
NAMES = st.sampled_from(['a', 'b', 'dtype', 'shape', 'data_offsets', '__metadata__', 'weight_map', 'step', ''])
NUMBERS = st.sampled_from([0, 1, 6, 24, 32, -1, 2**31, 2**63, 2**64, 10**30, True, 1.5, float('nan')])
JSON = st.recursive(
    st.none() | NUMBERS | st.sampled_from(['F32', 'F16', 'BF16', 'F8_E4M3', 'F99', '../x', '/etc/passwd', 'x\n']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


def to_file(header, data=b''):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, 'little') + text + data


def tensor_header(dtype='F32', shape=(2, 3), offsets=(0, 24)):
    return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)}


DATA = bytes(24)


@pytest.mark.parametrize(
    ('header', 'data', 'reason'),
    [
        ({'a': tensor_header(shape=(0, 2**62), offsets=(0, 0))}, b'', "safetensors: 'a'"),
        ({'a\nb\x1b[31m': tensor_header(offsets=(8, 32))}, bytes(32), r'a\nb\x1b[31m'),
    ],
    ids=['a shape beyond NumPy', 'a newline in a name'],
)
def test_an_invalid_header_raises_its_fault(tmp_path, header, data, reason):
    path = tmp_path / 'x.safetensors'
    path.write_bytes(to_file(header, data))
    assert reason in error_message(
        lambda: [np.asarray(array) for array in safetensors_files.open_weights_file(str(path))[0].values()]
    )


@FUZZ
@given(
    st.binary(max_size=200)
    | st.builds(to_file, JSON, st.binary(max_size=40))
    | st.builds(
        lambda changes: bytes(changes.get(i, byte) for i, byte in enumerate(save(GOOD))),
        st.dictionaries(st.integers(0, 150), st.integers(0, 255), max_size=4),
    )
)
@example(save(GOOD)[:-1])
@example(to_file({'a': {**tensor_header(), 'shape': [True, 6]}}, DATA))
def test_any_bytes_are_read_or_raise_a_one_line_error(tmp_path_factory, content):
    """Reads no more bytes than the header describes."""
    path = tmp_path_factory.getbasetemp() / 'fuzz.safetensors'
    path.write_bytes(content)
    for read in (safetensors_files.open_weights_file, safetensors_files.read_params):
        try:
            tensors = read(str(path))[0]
            values = map(np.asarray, tensors.values() if read is safetensors_files.open_weights_file else ())
            assert sum(value.nbytes for value in values) <= 8 * len(content)
        except UserError as error:
            assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('a/../../x.safetensors', 'outside of'),
        ('leaving.safetensors', 'is a link to '),
    ],
)
def test_an_index_cannot_name_files_outside_of_its_folder(tmp_path, name, reason):
    folder = tmp_path / 'folder'
    folder.mkdir()
    for parent in (tmp_path, folder):
        save_file(GOOD, parent / 'x.safetensors')
    (folder / 'leaving.safetensors').symlink_to(tmp_path / 'x.safetensors')
    (folder / safetensors_files.INDEX_FILE).write_text(json.dumps({'weight_map': {'a': name}}))
    assert reason in error_message(safetensors_files.open_weights_folder, folder, 'AutoModel')
    (folder / safetensors_files.INDEX_FILE).write_text(json.dumps({'weight_map': {'a': 'x.safetensors'}}))
    assert list(safetensors_files.open_weights_folder(folder, 'AutoModel')) == ['a']


@pytest.mark.parametrize(
    'change',
    [{'num_layers': 10**9}, {'layer_norm_epsilon': float('nan')}, {'model_type': ['t5\nx']}, {'d_model': '9' * 2000}],
)
def test_an_odd_config_raises_a_one_line_error(tmp_path, change):
    """tests/test_untrusted_files.py reads random configs."""
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_0_tiny')
    (folder / 'config.json').write_text(json.dumps({**hf_folders.V1_0, **change}))
    message = error_message(hf_folders.read_params, folder)
    assert 'config.json' in message and len(message) < 1000


def test_the_largest_sizes_raise_a_one_line_error():
    tokens = dict.fromkeys(('pad_token_id', 'cls_token_id', 'sep_token_id'), 1)
    config = {**dict.fromkeys(('vocab_size', 'intermediate_size'), MAX_NUMBER), **tokens}
    config |= {'hidden_size': 4, 'num_attention_heads': 1, 'num_hidden_layers': 2}
    family = ModernBert.from_config(HuggingFaceConfig(config, 'hf'))
    # In transformers 4, null selects the base of the global layers.
    null = HuggingFaceConfig({**config, 'local_rope_theta': None}, 'hf')
    assert 'rope_theta' in error_message(ModernBert.from_config, null)
    abstract = hf_folders.abstract_params(family)
    assert 'in hf do not fit' in error_message(family.read_params, {}, abstract, 'hf')


@pytest.mark.parametrize('name', ['config.json', 'deep/unread'])
def test_a_link_out_of_the_folder_raises_a_one_line_error(tmp_path, name):
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_0_tiny')
    (folder / 'deep').mkdir()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to('/etc/passwd')
    assert f'{name} is a link to ' in error_message(model_folders.open_model_folder, folder)


def test_metadata_of_our_files_is_checked(tmp_path):
    good = {'format': 'remixer_t5x', 'step': '3', 'versions': '{}'}
    for change, reason in (
        *(({'step': 'x'}, "step 'x'"), ({'step': '²'}, 'step'), ({'versions': '['}, 'invalid JSON')),
        ({'format': 'pt'}, '--from_hf'),
        *(({'lengths': '{"inputs": 3}'}, 'targets'), ({'lengths': '{"inputs": 3, "targets": "x"}'}, 'lengths')),
    ):
        save_file(GOOD, tmp_path / 'x', {**good, **change})
        assert reason in error_message(safetensors_files.read_params, str(tmp_path / 'x'))
    save_file(GOOD, tmp_path / 'x', good)
    assert safetensors_files.read_params(str(tmp_path / 'x'))[1] == 3
    save_file({'a': GOOD['a'], 'a/b': GOOD['b']}, tmp_path / 'x', good)
    error_message(safetensors_files.read_params, str(tmp_path / 'x'))
    os.mkfifo(tmp_path / 'pipe')
    assert 'is not a file' in error_message(safetensors_files.read_params, str(tmp_path / 'pipe'))
