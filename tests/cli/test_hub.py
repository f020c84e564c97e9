"""Hub downloads, Hub uploads and shared folders, with the real huggingface_hub and a fake server."""

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import gin
import markdown_it
import numpy as np
import pytest
from safetensors.numpy import load_file

import remixer_t5x
from remixer_t5x import UserError
from remixer_t5x.cli import conversions
from remixer_t5x.cli.main import main
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.extras.hub import client, shared_model
from remixer_t5x.extras.reports import run_records
from remixer_t5x.interop import converted_checkpoint, safetensors_files, shared_folder
from remixer_tasks.files import cache
from remixer_tasks.vocabulary import words_and_bytes
from tests.support import hf_folders, paths, saved_run
from tests.support.fake_hub import FakeHub

pytest.importorskip('huggingface_hub')
FLAN = 'google/flan-t5-tiny'
MIXER = 'from remixer_t5x.models.sublayers import fnet\nENCODER_MIXER = @fnet.FNet\nENCODER_POSITION_BIAS = None\n'


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = FakeHub()
    server.use(monkeypatch, tmp_path / 'cache')
    yield server
    server.close()
    gin.clear_config()


@pytest.fixture(scope='module')
def t5(tmp_path_factory):
    return hf_folders.write_tiny(tmp_path_factory.mktemp('hub') / 't5', 't5_v1_1_tiny')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Writes a MODEL_DIR with metrics of a model that transformers does not implement."""
    folder = saved_run.write_run(tmp_path_factory.mktemp('run') / 'mine', saved_run.CONFIG + MIXER, steps=(7,))
    config = (folder / 'config.gin').read_text()
    task = 'from remixer_tasks import catalogue\nMIXTURE_OR_TASK_NAME = @catalogue.task()\n'
    (folder / 'config.gin').write_text(f"{config}{task}FILES = '/home/anna/letters/*.txt'\nTRAIN_STEPS = 7\n")
    lines = [{'kind': 'train', 'step': step, 'loss': 6.0 / step, 'timing': {}} for step in range(1, 8)]
    lines.append({'kind': 'held_out', 'step': 7, 'loss': 1.25, 'bits_per_byte': 3.5, 'timing': {}})
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return folder


def convert_error(capsys, *argv):
    assert main(['convert', *argv]) == 2
    # The Hub client may log retries before the error.
    *others, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith('error: ') and 'Traceback' not in ' '.join(others), others
    return line


def test_tokens_in_a_separate_file_are_downloaded(hub, tmp_path):
    folder = hf_folders.write_tiny(tmp_path / 'bert', 'bert_tiny')
    (folder / 'vocab.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n')
    (folder / 'added_tokens.json').write_text('{"user": 5}')
    hub.add('anna/bert', folder)
    ids = [list(remixer_t5x.load(path).vocabulary.encode('user')) for path in (str(folder), 'hf://anna/bert')]
    assert ids == [[2, 5], [2, 5]]


def test_training_starts_from_the_current_revision_of_a_hub_model(hub, t5, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, 'get_cache_root', lambda: tmp_path)
    hub.add(FLAN, t5)
    first = conversions.get_or_convert_model_dir(FLAN)
    assert conversions.get_or_convert_model_dir(FLAN) == first
    hub.models[FLAN]['main']['README.md'] = b'a new commit'
    second = conversions.get_or_convert_model_dir(FLAN)
    assert second != first
    _, record, _ = converted_checkpoint.read_checkpoint(str(second))
    assert client.format_model_name(record['converted_from']).startswith(f'{FLAN}@')


def test_a_conversion_for_training_is_repeated_unless_its_check_succeeded(t5, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, 'get_cache_root', lambda: tmp_path)
    check = mock.Mock(side_effect=[UserError('the logits differ'), None])
    monkeypatch.setattr(conversions, '_compare_with_reference', check)
    with pytest.raises(UserError, match='the logits differ'):
        conversions.get_or_convert_model_dir(str(t5))
    folder = conversions.get_or_convert_model_dir(str(t5))
    assert conversions.get_or_convert_model_dir(str(t5)) == folder
    assert check.call_count == 2


def test_weights_in_an_automatic_hub_pull_request_are_downloaded(hub, t5, monkeypatch):
    hub.add(FLAN, t5, without='.safetensors')
    hub.add(FLAN, t5, 'refs/pr/3', without='config.json')
    hub.add(FLAN, t5, 'refs/pr/4')
    hub.pull_requests[FLAN] = [('stranger', 3, 'open'), ('SFconvertbot', 2, 'closed'), ('SFconvertbot', 4, 'open')]
    lines = []
    folder = client.resolve_folder(FLAN, lambda *line: lines.append(line))
    assert 'refs/pr/4' in lines[0][1] and (folder / 'model.safetensors').is_file()
    assert not [name for name in hub.requests if 'refs%2Fpr%2F3' in name]
    client.resolve_folder(f'{FLAN}@refs/pr/3')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    hub.requests.clear()
    assert client.resolve_folder(f'{FLAN}@refs/pr/4') == folder and not hub.requests
    with pytest.raises(UserError, match='cannot be downloaded'):
        client.resolve_folder('google/another')


def test_a_model_that_cannot_be_downloaded_raises_a_one_line_error(hub, t5, tmp_path, capsys):
    hub.add(FLAN, t5, without='.safetensors')
    hub.pull_requests[FLAN] = [('stranger', 3, 'open')]
    wrong = {FLAN: 'has neither model.safetensors', 'nobody/nothing': 'no such model', f'{FLAN}@v9': 'revision'}
    for name, words in {**wrong, '../up': 'is not a folder', 'a/b/c': 'is not a folder'}.items():
        assert words in convert_error(capsys, f'--from_hf={name}', f'--to={tmp_path}/x')
    assert not (tmp_path / 'x').exists()


def test_a_t5_is_downloaded_and_pushed_in_the_format_of_transformers(hub, t5, tmp_path, capsys):
    hub.add(FLAN, t5)
    hub.models[FLAN]['main']['pytorch_model.bin'] = b'a pickle'
    assert main(['convert', f'--from_hf={FLAN}', f'--to={tmp_path}/ours']) == 0
    assert f'hub          {FLAN}' in capsys.readouterr().out
    assert not [name for name in hub.requests if name.endswith('.bin')]
    assert main(['convert', f'--checkpoint={tmp_path}/ours', '--push_to_hub=anna/copy', '--private']) == 0
    assert f'pushed       {hub.address}/anna/copy' in capsys.readouterr().out
    pushed = hub.models['anna/copy']['main']
    assert 'anna/copy' in hub.private and hub.messages == ['Upload the checkpoint of step 0']
    assert json.loads(pushed['config.json'])['model_type'] == 't5' and 'spiece.model' in pushed
    card = pushed['README.md'].decode()
    assert 'library_name: "transformers"' in card and "from_pretrained('anna/copy')" in card
    assert f'converted from {FLAN}@' in card
    assert main(['convert', '--from_hf=anna/copy', f'--to={tmp_path}/back']) == 0
    first, second = (converted_checkpoint.read_checkpoint(str(tmp_path / name))[0] for name in ('ours', 'back'))
    assert safetensors_files.find_differing_array(first, second) is None
    np.testing.assert_array_equal(
        second['token_embedder']['embedding'], load_file(t5 / 'model.safetensors')['shared.weight']
    )


def test_nothing_is_uploaded_to_a_public_model_with_private(hub, t5):
    hub.add('anna/copy', t5)
    before = dict(hub.models['anna/copy']['main'])
    with pytest.raises(UserError, match='exists and is public'):
        client.upload_model(t5, 'anna/copy', True, 'a message')
    assert hub.models['anna/copy']['main'] == before and not hub.messages
    hub.private.add('anna/copy')
    client.upload_model(t5, 'anna/copy', True, 'a message')
    assert hub.messages == ['a message']


def test_a_model_unknown_to_transformers_is_pushed_and_loaded(hub, run, tmp_path, capsys):
    assert main(['convert', f'--checkpoint={run}', '--push_to_hub=anna/fnet']) == 0
    assert 'it has no encoder/layer/self_attention' in capsys.readouterr().out
    pushed = hub.models['anna/fnet']['main']
    assert {'README.md', 'loss.png', 'config.json', 'model.gin', 'model.safetensors'} <= set(pushed)
    # Neither data nor paths are uploaded.
    assert b'anna' not in pushed['model.gin'] and b'TRAIN_STEPS' not in pushed['model.gin']
    assert b'trust_gin' not in pushed['README.md']
    loaded = remixer_t5x.load('hf://anna/fnet')
    local = remixer_t5x.load(str(run))
    texts = ['a text', 'another']
    assert loaded.lengths == local.lengths
    np.testing.assert_array_equal(loaded.score(texts, texts), local.score(texts, texts))
    assert main(['convert', '--from_hf=anna/fnet', f'--to={tmp_path}/back']) == 0
    assert (tmp_path / 'back/model.gin').read_bytes().startswith(pushed['model.gin'].rstrip())
    back = remixer_t5x.load(str(tmp_path / 'back'))
    assert safetensors_files.find_differing_array(back.params, local.params) is None
    assert back.lengths == local.lengths and back.vocabulary == local.vocabulary


@pytest.fixture(scope='module')
def shared(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp('shared')
    with contextlib.chdir(folder):
        assert main(['convert', f'--checkpoint={run}', '--to_shared=fnet']) == 0
    return folder / 'fnet'


def test_the_card_has_recipe_metrics_and_curve_but_no_folder_names(shared):
    assert shared_model.PIPELINE_TAGS.keys() == batch_formats.FORMATS.keys()
    card = (shared / 'README.md').read_text()
    front = card.split('---')[1]
    assert 'library_name: "remixer_t5x"' in front and '"fnet"' in front
    for words in (
        *('| held_out | 7 | loss | 1.25 |', '| held_out | 7 | bits_per_byte | 3.5 |', '| TRAIN_STEPS | `7` |'),
        *('![Training and held-out loss](loss.png)', 'Finished all 7 steps.', '| encoder | FNet, GatedMLP |'),
        "| FILES | `'*.txt'` |",
    ):
        assert words in card, words
    assert '/home/anna' not in card and '*.txt' in card
    assert (shared / 'loss.png').read_bytes().startswith(b'\x89PNG')
    # The folder was relative.
    assert "remixer_t5x.load('./fnet'" in card and '--from_hf=./fnet' in card
    assert remixer_t5x.load(str(shared)).generate('a text', max_length=3)
    with pytest.raises(UserError, match='contains a vocabulary'):
        remixer_t5x.load(str(shared), vocabulary='spiece.model')


def test_a_t5_whose_vocabulary_hugging_face_lacks_is_shared_with_the_vocabulary(tmp_path):
    words = words_and_bytes.WordVocabulary('two words', lambda: ['a text'])
    task_vocabulary.save_vocabulary(words, tmp_path / 'vocabulary')
    saved = f"@vocabularies.saved()\nvocabularies.saved.folder = '{tmp_path}'"
    config = saved_run.CONFIG.replace('@vocabularies.byte()', saved)
    run = saved_run.write_run(tmp_path / 'mine', config, (1,), words)
    assert main(['convert', f'--checkpoint={run}', f'--to_shared={tmp_path}/shared']) == 0
    assert remixer_t5x.load(str(tmp_path / 'shared')).vocabulary.words == words.words


@pytest.mark.parametrize('ends_inputs', [True, False])
def test_a_shared_gpt2_scores_like_the_original_with_and_without_end_tokens_in_prompts(ends_inputs, tmp_path, capsys):
    loaded = remixer_t5x.load(str(hf_folders.write_gpt2(tmp_path / 'gpt2')))
    trained = dataclasses.replace(loaded, ends_inputs=ends_inputs)
    saved = trained.save(tmp_path / 'saved')
    assert main(['convert', f'--checkpoint={saved}', f'--to_shared={tmp_path}/shared']) == 0
    assert ('its inputs end with the end token' in capsys.readouterr().out) == ends_inputs
    shared = remixer_t5x.load(str(tmp_path / 'shared'))
    np.testing.assert_allclose(shared.score('the', 'cat'), trained.score('the', 'cat'), rtol=1e-5)


def test_the_card_of_an_earlier_checkpoint_lacks_later_results(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'mine'
    shutil.copytree(run, folder)
    (folder / 'checkpoints/7').rename(folder / 'checkpoints/5')
    with (folder / 'metrics.jsonl').open('a') as file:
        file.write('{"kind": "held_out", "step": 4, "loss": 2.5, "timing": {}}\n')
    assert main(['convert', f'--checkpoint={folder}', '--to_shared=shared']) == 0
    card = (tmp_path / 'shared/README.md').read_text()
    assert "remixer_t5x.load('./shared'" in card and '--from_hf=./shared' in card
    assert '| held_out | 4 | loss | 2.5 |' in card and '| held_out | 7 |' not in card
    assert 'The whole run: Finished all 7 steps.' in card


def test_a_model_gin_that_names_other_code_needs_consent(shared, tmp_path, capsys, monkeypatch):
    """Neither `load` nor `convert` imports anything without consent."""
    (tmp_path / 'stranger_module.py').write_text('raise SystemExit("it ran")')
    monkeypatch.syspath_prepend(tmp_path)
    folder = shutil.copytree(shared, tmp_path / 'copy')
    with (folder / 'model.gin').open('a') as file:
        file.write('\nimport stranger_module\n')
    with pytest.raises(UserError, match='trust_gin=True') as error:
        remixer_t5x.load(str(folder))
    assert '\n' not in str(error.value)
    assert '--trust_gin' in convert_error(capsys, f'--from_hf={folder}', f'--to={tmp_path}/back')
    assert not (tmp_path / 'back').exists()
    (tmp_path / 'stranger_module.py').write_text('')
    assert main(['convert', f'--from_hf={folder}', f'--to={tmp_path}/back', '--trust_gin']) == 0


def write_run_with_mixer(folder, monkeypatch, modules):
    """Writes a MODEL_DIR whose encoder has a custom mixer from a module in the folder `src`."""
    (folder / 'src').mkdir()
    for name, text in modules.items():
        (folder / 'src' / name).write_text(text)
    monkeypatch.syspath_prepend(folder / 'src')
    config = f'{saved_run.CONFIG}import own_mixers\nENCODER_MIXER = @own_mixers.Own\nENCODER_POSITION_BIAS = None\n'
    return saved_run.write_run(folder / 'mine', config, steps=(1,))


CUSTOM_MIXER = (
    'import own_helpers\nfrom remixer_t5x.models.sublayers.fnet import FNet\n\n\nclass Own(FNet):\n    pass\n'
)
# Loads the first folder without consent to its code, and the second with it.
LOAD = """
import remixer_t5x, sys
remixer_t5x.load(sys.argv[1])
print(remixer_t5x.load(sys.argv[2], trust_gin=True).score(['a'], ['b'])[0])
"""


def test_a_custom_mixer_is_shared_with_its_modules_and_imported_only_with_consent(shared, tmp_path, monkeypatch):
    model = write_run_with_mixer(tmp_path, monkeypatch, {'own_mixers.py': CUSTOM_MIXER, 'own_helpers.py': ''})
    [score] = remixer_t5x.load(str(model)).score(['a'], ['b'])
    assert main(['convert', f'--checkpoint={model}', f'--to_shared={tmp_path}/shared']) == 0
    assert sorted(path.name for path in (tmp_path / 'shared/code').iterdir()) == ['own_helpers.py', 'own_mixers.py']
    card = (tmp_path / 'shared/README.md').read_text()
    assert card.index('own_mixers') < card.index('|')
    untrusted = shutil.copytree(shared, tmp_path / 'untrusted')
    (untrusted / 'code').mkdir()
    for name in ('tensorflow', 'seqio', 'remixer_tasks', 'sentencepiece'):
        (untrusted / 'code' / f'{name}.py').write_text("raise SystemExit('imported')")
    # This process imports no untrusted code, and finds the custom modules only in the shared folder.
    program = [sys.executable, '-c', LOAD, str(untrusted), str(tmp_path / 'shared')]
    done = subprocess.run(program, cwd=tmp_path / 'shared', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(float(done.stdout), score, rtol=1e-5)
    with pytest.raises(UserError, match='trust_gin=True'):
        remixer_t5x.load(str(tmp_path / 'shared'))
    # This process has loaded another module of this name.
    (tmp_path / 'shared/code/own_mixers.py').write_text('')
    with pytest.raises(UserError, match='own_mixers is already loaded from'):
        remixer_t5x.load(str(tmp_path / 'shared'), trust_gin=True)


def test_only_python_files_of_custom_packages_are_shared(tmp_path, monkeypatch):
    """The custom modules are inside a checkout of this package; the package itself is not copied."""
    (tmp_path / 'remixer_t5x').mkdir()
    (tmp_path / 'own_module.py').write_text('import own_package\nimport remixer_t5x')
    for name in ('__init__.py', 'layers/mixer.py', '.env', '.git/hook.py', 'notes.txt', '__pycache__/mixer.pyc'):
        paths.write_text(tmp_path / 'own_package' / name, '')
    monkeypatch.syspath_prepend(tmp_path)
    assert shared_folder.copy_custom_code(tmp_path / 'shared', ['own_module']) == []
    code = tmp_path / 'shared/code'
    files = {str(path.relative_to(code)) for path in code.rglob('*') if path.is_file()}
    assert files == {'own_module.py', 'own_package/__init__.py', 'own_package/layers/mixer.py'}


def test_values_in_a_card_are_plain_text(run, monkeypatch):
    """Names of evaluations and folders, and the source of weights, may be untrusted."""
    hostile = '\n# heading\n[link](https://evil.example) <img src=x onerror=y> https://evil.example `code` | cell'
    card = shared_model.ModelCard(
        name=f'x;touch y{hostile}',
        address=f"x;touch y'{hostile}\n```",
        auto_class='AutoModelForSeq2SeqLM',
        model_type='encoder_decoder',
        parameters=1,
        sublayers={hostile: [hostile]},
        vocabulary=hostile,
        step=7,
        versions={hostile: hostile},
        origin=hostile,
    )
    (finished,) = run_records.read_runs([str(run)])
    latest = {hostile: finished.find_latest_evaluations()['held_out']}
    monkeypatch.setattr(type(finished), 'find_latest_evaluations', lambda self: latest)
    text = shared_model.render_model_card(card, finished).split('---\n', 2)[2]
    assert text.count('heading') > 5
    html = markdown_it.MarkdownIt('commonmark').enable('table').render(text)
    outside = re.sub(r'<pre>.*?</pre>', '', html, flags=re.DOTALL)
    assert '<h1>heading' not in html and '<img' not in html and '<a ' not in html and '<h1>x;touch y' in html, html
    assert not re.search('https://evil', re.sub(r'```.*?\n```\n', '', text, flags=re.DOTALL)) and 'heading' in outside
    (command,) = [line for line in text.splitlines() if line.startswith('remixer-t5x convert')]
    assert len(shlex.split(command)) == 4
