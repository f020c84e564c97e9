"""No pickle is loaded, and gin files are loaded only from locations that the user specified.

ruff's rules in pyproject.toml forbid importing pickle and similar modules, evaluating text, starting shells, and
extracting archives without a filter.
"""

import ast
import pathlib
import pickle  # noqa: TID251 (makes a malicious pickle, to show that it is not run)

import pytest

from remixer_t5x.checkpoints import checkpoint_paths, saved_params
from remixer_t5x.data import task_vocabulary
from remixer_t5x.evaluate import checkpoint_evaluation
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint
from remixer_tasks import local_files, pair_inputs, vocabularies
from remixer_tasks.benchmarks import raw_rows
from remixer_tasks.files import text_lines
from tests.support.error_lines import error_message
from tests.support.untrusted_inputs import Malicious

ROOT = pathlib.Path(__file__).parents[1]
# Files that let transformers run PyTorch code that this package has just written. In model_folders.py, this is an
# argument whose default is False.
PYTORCH_CODE_LOADERS = {
    *(f'remixer_t5x/interop/huggingface/{name}.py' for name in ('model_folders', 'pytorch_export')),
    *('tests/cli/test_convert_code.py', 'tests/interop/test_pytorch_export.py'),
}


def find_sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]


def unsafe_calls(text):
    """Yields the calls that could run code from a file; `np.load` is safe by default."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            options = {keyword.arg: getattr(keyword.value, 'value', '?') for keyword in node.keywords}
            may_unpickle = ast.unparse(node.func) == 'torch.load' and options.get('weights_only') is not True
            if may_unpickle or any(
                options.get(name, False) is not False for name in ('allow_pickle', 'trust_remote_code')
            ):
                yield f'{node.lineno}: {ast.unparse(node)}'


def test_no_call_could_run_code_in_a_file():
    sources = find_sources('remixer_t5x', 'tasks', 'scripts', 'tests')
    unsafe = {path for path in sources if any(unsafe_calls(path.read_text(encoding='utf-8')))}
    assert {path.relative_to(ROOT).as_posix() for path in unsafe} == PYTORCH_CODE_LOADERS


def document_reader(extension):
    layout = local_files.TextLayout(extension)
    return lambda path: list(local_files.read_documents(str(path), layout, text_lines.BadRecords(strict=True)))


READERS = {
    **{extension: document_reader(extension) for extension in local_files.FORMATS},
    'rows jsonl': lambda path: list(raw_rows.read_jsonl(str(path))),
    'rows csv': lambda path: list(raw_rows.read_csv(str(path))),
    'rows json': lambda path: raw_rows.parse_json_file(str(path)),
    'vocabulary': lambda path: vocabularies.sentencepiece(str(path)).vocab_size,
    'predictions': lambda path: checkpoint_evaluation.read_predictions(str(path)),
    'texts': lambda path: list(pair_inputs.TextInputs(str(path), format='jsonl')),
    'weights': lambda path: safetensors_files.open_weights_folder(path.parent, 'AutoModel'),
    'safetensors': lambda path: safetensors_files.read_params(str(path)),
    'T5X checkpoint': lambda path: t5x_checkpoint.read_t5x_checkpoint(str(path.parent), {}),
    'checkpoint': lambda path: saved_params.read_record(checkpoint_paths.find_checkpoint(str(path.parent / 'run'))),
}


@pytest.mark.parametrize('kind', READERS)
def test_a_pickle_is_not_run(tmp_path, kind):
    ran = tmp_path / 'ran'
    path = tmp_path / 'file'
    path.write_bytes(pickle.dumps(Malicious(ran)))
    names = ('metadata', '_METADATA', 'checkpoint', 'manifest.ocdbt')
    copies = [f'run/checkpoints/1/{item}/{name}' for item in ('state', 'run') for name in names]
    for name in (*copies, 'model.safetensors', 'checkpoint_7/checkpoint'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(path.read_bytes())
    error_message(READERS[kind], path)
    assert not ran.exists()
    pickle.loads(path.read_bytes())
    assert ran.exists(), 'the pickle has no effect, so this test proves nothing'


# Modules that load gin files: files on the command line; a shipped model by name; the file that `convert` has just
# written from validated numbers; files that the caller of `build_model` names; and the configuration of a run, as
# documented for `load` and `report --pictures`.
LOADERS = {
    *('remixer_t5x/cli/arguments.py', 'remixer_t5x/cli/info/model.py', 'remixer_t5x/cli/info/self_check.py'),
    'remixer_t5x/cli/conversions.py',
    *('remixer_t5x/api/model_building.py', 'remixer_t5x/api/saved_models.py'),
}
LOAD_CALLS = ('loading.load_gin_config(', 'loading.load_macro_values(', 'build_model(', 'gin.parse_config')


def test_gin_files_are_loaded_only_from_the_given_locations():
    """gin runs code by design, so it is never loaded implicitly from a checkpoint, a MODEL_DIR or a data folder."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in find_sources('remixer_t5x', 'tasks')}
    loaders = {name for name, text in texts.items() if any(call in text for call in LOAD_CALLS)}
    assert {name for name in loaders if not name.startswith('remixer_t5x/config/')} == LOADERS


def test_values_of_a_hugging_face_folder_cannot_inject_gin():
    """The gin text of a converted model contains only our statements with validated numbers."""
    from remixer_t5x.interop.huggingface.bert import Bert

    sizes = dict.fromkeys(('vocab_size', 'embed_dim', 'mlp_dim', 'num_heads', 'head_dim', 'num_encoder_layers'), 4)
    hostile = "x'\nimport os\rX = @os.system()\u2028Y = 1\x85include 'evil.gin'\x0b"
    names = []
    for name in (hostile, 'x'):
        text = Bert(**sizes, max_length=8).build_gin_text(
            f'Converted from {name}'
        ) + task_vocabulary.build_vocabulary_statements(name)
        text += '\n'.join(' = '.join(flag) for flag in task_vocabulary.build_vocabulary_flags('wordpiece', path=name))
        names.append([line.split('=')[0].split('#')[0] for line in text.splitlines()])
    assert names[0] == names[1]
