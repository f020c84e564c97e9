"""`convert --to_hf` of a model that transformers does not implement, and use of the folder without JAX."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from tests.support import references, saved_run

CONFIG = saved_run.CONFIG.replace("include 'models/t5_1_1.gin'", "include 'models/remixer.gin'") + 'REMIXER_DIM = 24\n'
# Loads the folder in a process that can import neither JAX nor this package.
WITHOUT_JAX = """
    import sys

    sys.modules.update(dict.fromkeys(('jax', 'flax', 'remixer_t5x', 'tensorflow', 'seqio', 'gin')))
    import torch, transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained('exported', trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained('exported', trust_remote_code=True)
    ids = tokenizer('reverse: a b c', return_tensors='pt').input_ids
    print('answer:', *model.generate(ids, max_new_tokens=12, do_sample=False)[0, 1:].tolist())
"""


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('code')
    saved_run.write_run(folder / 'run', CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def test_a_remixer_becomes_a_folder_that_transformers_loads(current_folder, capsys):
    assert main(['convert', '--gin_file=run/config.gin', '--checkpoint=run', '--to_hf=exported']) == 0
    out = capsys.readouterr().out
    assert 'PyTorch code' in out and 'AutoModelForSeq2SeqLM' in out and 'trust_remote_code=True' in out
    files = {path.name for path in (current_folder / 'exported').iterdir()}
    assert files == {'config.json', 'modeling_remixer_t5x.py', 'model.safetensors', 'tokenizer_config.json'}
    with pytest.raises(remixer_t5x.UserError, match='an export to PyTorch; use the MODEL_DIR'):
        remixer_t5x.load('exported')
    references.require('torch', 'transformers')
    assert 'logits of the PyTorch code and ours differ by' in out
    command = [sys.executable, '-c', textwrap.dedent(WITHOUT_JAX)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=current_folder).stdout
    [answer] = remixer_t5x.load('run').generate('reverse: a b c', max_length=12)
    ids = [int(token) for token in printed.partition('answer:')[2].splitlines()[0].split()]
    assert len(ids) == 12 and saved_run.VOCABULARY.decode(ids) == answer.text


@pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::DeprecationWarning')
def test_the_encoder_becomes_onnx(current_folder, tmp_path):
    references.require('torch', 'transformers', 'onnx', 'onnxscript', 'onnxruntime')
    import onnxruntime
    import torch
    import transformers

    if not (current_folder / 'exported').exists():
        assert main(['convert', '--gin_file=run/config.gin', '--checkpoint=run', '--to_hf=exported']) == 0
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        current_folder / 'exported', trust_remote_code=True
    ).eval()
    ids, file = torch.randint(2, 300, (2, 12)), str(tmp_path / 'encoder.onnx')
    torch.onnx.export(model.get_encoder(), (ids,), file, input_names=['input_ids'], dynamo=True)
    [hidden] = onnxruntime.InferenceSession(file).run(None, {'input_ids': ids.numpy()})
    with torch.no_grad():
        expected = model.encode(ids)[0].numpy()
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
