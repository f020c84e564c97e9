"""No pickle is run, and gin is loaded only from where the user said.

ruff's rules in pyproject.toml forbid imports of pickle and its relatives, evaluation of text, shells, and archives that
are extracted without a filter.
"""

import ast
import pathlib
import pickle  # noqa: TID251 (makes a malicious pickle, to show that it is not run)

import pytest

from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
# transformers loads the PyTorch code that this package has just written.
OUR_CODE = {
    'remixer_t5x/interop/huggingface/pytorch_export.py',
    *('tests/cli/test_convert_code.py', 'tests/interop/test_pytorch_export.py'),
}


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]


def unsafe_calls(text):
    """Yields calls that could run code in a file; `np.load` is safe by default."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            options = {keyword.arg: getattr(keyword.value, 'value', '?') for keyword in node.keywords}
            may_unpickle = ast.unparse(node.func) == 'torch.load' and options.get('weights_only') is not True
            if may_unpickle or any(
                options.get(name, False) is not False for name in ('allow_pickle', 'trust_remote_code')
            ):
                yield f'{node.lineno}: {ast.unparse(node)}'


def test_no_call_could_run_code_in_a_file():
    for path in sources('remixer_t5x', 'tasks', 'scripts', 'tests'):
        if path.relative_to(ROOT).as_posix() not in OUR_CODE:
            assert not [*unsafe_calls(path.read_text(encoding='utf-8'))], path


UNSAFE = ('np.load(f, allow_pickle=flag)', 'torch.load(f)', 'torch.load(f, weights_only=False)')
UNSAFE += ('f(x, trust_remote_code=True)',)


@pytest.mark.parametrize(
    'text', [*UNSAFE, 'np.load(f)', 'np.load(f, allow_pickle=False)', 'torch.load(f, weights_only=True)']
)
def test_unsafe_calls_are_detected(text):
    assert len([*unsafe_calls(text)]) == (text in UNSAFE)


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

        return list(documents.read_documents(str(path), documents.Layout(extension), malformed.Malformed(strict=True)))

    return read


def _rows(reader):
    def read(path):
        from remixer_tasks.benchmarks import raw_rows

        found = getattr(raw_rows, reader)(str(path))
        return list(found) if reader != 'parse_json_file' else found

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
    'rows jsonl': _rows('jsonl'), 'rows csv': _rows('csv'), 'rows json': _rows('parse_json_file'),
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
def test_gin_files_are_loaded_only_from_the_given_locations(name):
    """gin runs code by design, so nothing loads it from a checkpoint, a MODEL_DIR or a folder of data by itself."""
    assert name in LOADERS


def test_values_of_a_hugging_face_folder_cannot_inject_gin():
    """The text of a converted model has our statements, with numbers that were checked, and nothing else."""
    from remixer_t5x.interop.huggingface.bert import Bert

    sizes = dict.fromkeys(('vocab_size', 'embed_dim', 'mlp_dim', 'num_heads', 'head_dim', 'num_encoder_layers'), 4)
    hostile = "x'\nimport os\rX = @os.system()\u2028Y = 1\x85include 'evil.gin'\x0b"
    names = []
    for name in (hostile, 'x'):
        text = Bert(**sizes, max_length=8).gin_text(f'Converted from {name}') + task_vocabulary.gin_statements(name)
        text += '\n'.join(' = '.join(flag) for flag in task_vocabulary.gin_flags('wordpiece', path=name))
        names.append([line.split('=')[0].split('#')[0] for line in text.splitlines()])
    assert names[0] == names[1]
