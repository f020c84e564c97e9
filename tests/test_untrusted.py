"""No pickle is read or written anywhere, nothing evaluates text, and gin is loaded from where the user said alone."""

import ast
import pathlib
import pickle

import pytest

from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
FORBIDDEN = {
    'pickle',
    'cPickle',
    '_pickle',
    'dill',
    'cloudpickle',
    'joblib',
    'shelve',
    'marshal',
    'jsonpickle',
    'pandas',
}
CALLS = {'eval', 'exec', 'compile', '__import__'}
# They make a malicious pickle, to show that it is not run.
MAKERS = {'tests/test_untrusted.py', 'tests/interop/test_untrusted_folders.py', 'tests/interop/test_t5x_checkpoint.py'}
# It does what `python -c` does, in a process that has imported the libraries.
INTERPRETER = 'tests/support/warm_python.py'
# Their pickles go through pipes between this process and processes that it started.
PIPES = {'tasks/remixer_tasks/files/workers.py'}
PRODUCT = ('remixer_t5x', 'tasks', 'scripts')


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]


# transformers loads the PyTorch code that this package has just written.
OUR_CODE = {
    'remixer_t5x/interop/huggingface/pytorch_export.py',
    *('tests/cli/test_convert_code.py', 'tests/interop/test_pytorch_export.py'),
}


def offences(path):
    """What must not be, as text, with the line."""
    name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding='utf-8'))
    for node in ast.walk(tree):
        for what in _offence(node, name.startswith(PRODUCT)):
            may_pickle = name in MAKERS | PIPES
            if what.endswith('trust_remote_code') and name in OUR_CODE:
                continue
            if not (may_pickle and what == 'import pickle' or name == INTERPRETER and what in ('exec', 'compile')):
                yield f'{name}:{node.lineno}: {what}'


def _offence(node, is_product):
    if isinstance(node, ast.Import):
        yield from (f'import {a.name}' for a in node.names if a.name.partition('.')[0] in FORBIDDEN)
    elif isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] in FORBIDDEN:
        yield f'import {node.module}'
    elif isinstance(node, ast.Call):
        options = {keyword.arg: getattr(keyword.value, 'value', '?') for keyword in node.keywords}
        called = ast.unparse(node.func)
        if called in CALLS:
            yield called
        # False is NumPy's default; in what users run it has to be seen.
        if called in ('np.load', 'numpy.load', 'jnp.load') and options.get('allow_pickle', is_product) is not False:
            yield f'{called} without allow_pickle=False'
        if called == 'torch.load' and options.get('weights_only') is not True:
            yield 'torch.load without weights_only=True'
        if called in ('yaml.load', 'yaml.unsafe_load', 'yaml.full_load') or called.endswith(
            ('.read_pickle', '.to_pickle')
        ):
            yield called
        if options.get('trust_remote_code', False) is not False:
            yield f'{called} with trust_remote_code'
        if options.get('shell', False) is not False:
            yield f'{called} with a shell'
        if called.endswith('.extractall') and options.get('filter') != 'data':
            yield f"{called} without filter='data'"


def test_no_pickle_and_no_evaluation_of_text():
    found = [what for path in sources(*PRODUCT, 'tests') for what in offences(path)]
    assert len(sources(*PRODUCT)) > 100, 'the search finds no files'
    assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    'text',
    ['import pickle', 'from dill import loads', 'import joblib.x', 'np.load(f)', 'np.load(f, allow_pickle=True)',
     'np.load(f, allow_pickle=flag)', 'torch.load(f)', 'torch.load(f, weights_only=False)', 'yaml.load(f)', 'eval(x)',
     'exec(x)', 'pd.read_pickle(f)', 'run(x, shell=True)', 'f(x, trust_remote_code=True)', 'tar.extractall(x)'],
)  # fmt: skip
def test_the_search_sees_each_kind(text):
    assert [what for node in ast.walk(ast.parse(text)) for what in _offence(node, is_product=True)]


@pytest.mark.parametrize('text', ['np.load(f, allow_pickle=False)', 'torch.load(f, weights_only=True)', 'model.eval()'])
def test_what_is_allowed_is_not_found(text):
    assert not [what for node in ast.walk(ast.parse(text)) for what in _offence(node, is_product=True)]


class Malicious:
    """Unpickling one touches `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def _documents(extension):
    def read(path):
        from remixer_tasks.corpora import documents
        from remixer_tasks.files import malformed

        return list(documents.read(str(path), documents.Layout(extension), malformed.Malformed(strict=True)))

    return read


def _rows(reader):
    def read(path):
        from remixer_tasks.benchmarks import raw_rows

        found = getattr(raw_rows, reader)(str(path))
        return list(found) if reader != 'whole_json' else found

    return read


def _vocabulary(path):
    from remixer_tasks import vocabularies

    return vocabularies.sentencepiece(str(path)).vocab_size


def _predictions(path):
    from remixer_t5x.evaluate import results

    return results.read_predictions(str(path))


def _texts(path):
    from remixer_t5x.evaluate import text_inputs

    return list(text_inputs.TextInputs(str(path), format='jsonl'))


def _checkpoint(path):
    from remixer_t5x.checkpoints import saved_params

    return saved_params.read_record(saved_params.find_checkpoint(str(path.parent / 'run')))


READERS = {
    'txt': _documents('txt'), 'jsonl': _documents('jsonl'), 'tsv': _documents('tsv'), 'parquet': _documents('parquet'),
    'rows jsonl': _rows('jsonl'), 'rows csv': _rows('csv'), 'rows json': _rows('whole_json'),
    'vocabulary': _vocabulary, 'predictions': _predictions, 'texts': _texts, 'checkpoint': _checkpoint,
}  # fmt: skip


@pytest.mark.parametrize('kind', READERS)
def test_a_pickle_is_not_run(tmp_path, kind):
    """Those of safetensors, Hugging Face's folders and T5X's checkpoints are tried in tests/interop."""
    ran = tmp_path / 'ran'
    path = tmp_path / 'given'
    path.write_bytes(pickle.dumps(Malicious(ran)))
    for place in ('state', 'run'):
        (tmp_path / 'run' / 'checkpoints' / '1' / place).mkdir(parents=True)
        for name in ('metadata', '_METADATA', 'checkpoint', 'manifest.ocdbt'):
            (tmp_path / 'run' / 'checkpoints' / '1' / place / name).write_bytes(path.read_bytes())
    with pytest.raises(UserError) as error:
        READERS[kind](path)
    assert len(str(error.value).splitlines()) == 1
    assert not ran.exists()
    pickle.loads(path.read_bytes())
    assert ran.exists(), 'the pickle does nothing, so this test shows nothing'


# Who gives files to gin, and which: the files of the command line; a shipped model by its name; what `convert` has just
# written, of numbers that were checked; those that the caller of `build_model` names; and for `load` and
# `report --pictures`, which say so, a run's own.
LOADERS = {
    *('remixer_t5x/cli/arguments.py', 'remixer_t5x/cli/info/models.py', 'remixer_t5x/cli/info/self_check.py'),
    'remixer_t5x/cli/convert/huggingface.py',
    *('remixer_t5x/extras/reports/write.py', 'remixer_t5x/api/building.py', 'remixer_t5x/api/saved_models.py'),
    *('remixer_t5x/extras/reports/equal.py', 'remixer_t5x/extras/reproduce/runs.py'),
}
LOADS = ('loading.load(', 'loading.values(', 'build_model(', 'gin.parse_config')


def _loaders():
    for path in sources('remixer_t5x', 'tasks'):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith('remixer_t5x/config/') and any(call in path.read_text() for call in LOADS):
            yield name


@pytest.mark.parametrize('name', sorted({*_loaders(), *LOADERS}))
def test_gin_is_loaded_from_where_the_user_said_alone(name):
    """gin runs code by design, so nothing loads it from a checkpoint, a MODEL_DIR or a folder of data by itself."""
    assert name in LOADERS


def test_nothing_in_a_hugging_face_folder_gets_into_gin():
    """The text of a converted model has our statements, with numbers that were checked, and nothing else."""
    from remixer_t5x.interop.huggingface.bert import Bert

    sizes = dict.fromkeys(('vocab_size', 'embed_dim', 'mlp_dim', 'num_heads', 'head_dim', 'num_layers'), 4)
    hostile = "x'\nimport os\rX = @os.system()\u2028Y = 1\x85include 'evil.gin'\x0b"
    names = []
    for name in (hostile, 'x'):
        text = Bert(**sizes, max_length=8).gin_text(f'Converted from {name}') + task_vocabulary.gin_statements(name)
        text += '\n'.join(' = '.join(flag) for flag in task_vocabulary.gin_flags('wordpiece', path=name))
        names.append([line.split('=')[0].split('#')[0] for line in text.splitlines()])
    assert names[0] == names[1]
