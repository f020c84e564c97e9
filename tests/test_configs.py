"""All shipped gin files can be loaded, and every model has the expected number of parameters."""

import functools
import math
import re

import jax
import pytest
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.cli import train
from remixer_t5x.cli.info import model as info_model
from remixer_t5x.config import gin_files, loading
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from tests.support import parameters
from tests.support.paths import CONFIGS, ROOT

SHAPES = {'encoder_input_tokens': (1, 512), 'decoder_target_tokens': (1, 114)}

# Published sizes, and one size of each of our models: `remixer-t5x info --gin_file=models/MODEL.gin
# --gin_file=sizes/SIZE.gin` prints them.
PARAMETERS = {
    # From T5's v1.1 checkpoints (small to xxl).
    ('t5_1_1', 'mini'): 9_012_992,
    ('t5_1_1', 'tiny'): 22_746_880,
    ('t5_1_1', 'small'): 76_961_152,
    ('t5_1_1', 'base'): 247_577_856,
    ('t5_1_1', 'large'): 783_150_080,
    ('t5_1_1', 'xl'): 2_849_757_184,
    ('t5_1_1', 'xxl'): 11_135_332_352,
    # As Hugging Face publishes them: t5-base, t5-large.
    ('t5_1_0', 'base'): 222_903_552,
    ('t5_1_0', 'large'): 737_668_096,
    # As Hugging Face counts BertForMaskedLM: bert-base-uncased and bert-large-uncased.
    ('bert', 'base'): 109_514_298,
    ('bert', 'large'): 335_174_458,
    # As OpenAI published them.
    ('gpt2', 'base'): 124_439_808,
    ('gpt2', 'large'): 354_823_168,
    # 224M in REMIXERS, table 1.
    ('remixer_scaled', 'scaled_base'): 224_012_385,
    ('modern_bert', 'base'): 124_277_440,
    ('t5_1_1', 'hyper_mixer_paper'): 24_319_232,
    ('hyper_mixer', 'hyper_mixer_paper'): 22_506_496,
    ('gmlp', 'gmlp_paper_base'): 187_347_920,
    ('gmlp', 'gmlp_paper_large'): 531_297_696,
    ('amlp', 'gmlp_paper_base'): 157_583_324,
    ('amlp', 'gmlp_paper_large'): 455_047_608,
    ('modern_t5', 'tiny'): 22_997_504,
    ('remixer', 'tiny'): 23_271_176,
    ('mixer_enc', 'tiny'): 22_749_824,
    ('mixer_enc_dec', 'tiny'): 22_737_668,
    ('hyper_mixer', 'tiny'): 22_717_952,
    ('linear_transformer', 'tiny'): 22_746_624,
    ('fnet', 'tiny'): 22_730_368,
    ('gmlp', 'tiny'): 22_834_172,
    ('gmlp_mixer', 'tiny'): 22_236_668,
    ('amlp', 'tiny'): 22_815_740,
    ('tim', 'tiny'): 22_780_672,
}
# Published sizes whose flags are in the headers of models/*.gin.
SIZES_IN_HEADERS = [('t5_1_0', 'small', 60_506_624), ('gpt2', 'large', 774_030_080), ('gpt2', 'XL', 1_557_611_200)]
# As transformers counts ModernBertForMaskedLM.
SIZES_IN_HEADERS += [('modern_bert', 'base', 149_655_232)]
# Largest relative difference from T5.1.1.
MATCHED_SIZES = {'mini': 0.12, 'small': 0.03, 'base': 0.03, 'large': 0.03}
# Models that do not match the size of T5.1.1: a deeper encoder, T5 v1.0 with tied embeddings, and models of one stack
# with other vocabularies.
UNMATCHED_MODELS = {'remixer_scaled', 't5_1_0', 'bert', 'modern_bert', 'gpt2'}
VOCABULARIES = {'bert': {'VOCAB_SIZE': 30522}, 'modern_bert': {'VOCAB_SIZE': 50368}, 'gpt2': {'VOCAB_SIZE': 50257}}


MATCHED_MODELS = sorted({model for model, _ in PARAMETERS} - UNMATCHED_MODELS - {'t5_1_1'})


@functools.cache
def build_shapes(model, size, **macros):
    """Returns a model and the shapes of its parameters."""
    built = build_model(f'models/{model}.gin', f'sizes/{size}.gin', **VOCABULARIES.get(model, {}), **macros)
    return built, interface.compute_param_shapes(built, batch_formats.get_batch_shapes(built.model_type))


def count_parameters(model, size, **macros):
    return sum(leaf.size for leaf in jax.tree.leaves(build_shapes(model, size, **macros)[1]))


def list_references_of_models():
    """Yields each macro that a model or sublayer file sets to a reference, and the reference."""
    for file in sorted(CONFIGS.glob('models/*.gin')) + sorted(CONFIGS.glob('sublayers/*.gin')):
        for macro, reference in re.findall(r'^([A-Z_]+) = (@\S+)$', file.read_text(), re.M):
            if macro not in ('MODEL', 'MAX_INPUT_LENGTH', 'MAX_TARGET_LENGTH'):
                yield f'{file.parent.name}/{file.name}', macro, reference


@pytest.mark.parametrize(('file', 'macro', 'reference'), tuple(list_references_of_models()))
def test_a_factory_instead_of_an_object_and_the_reverse_are_rejected(file, macro, reference):
    wrong = reference.removesuffix('()') if reference.endswith('()') else f'{reference}()'
    model = file.replace('sublayers/', 'models/')
    files = ['models/t5_1_1.gin', file, *([model] if (CONFIGS / model).exists() else []), 'sizes/tiny.gin']
    with pytest.raises(UserError, match=f'^{macro} must be '):
        loading.load_gin_config(loading.ConfigSources(files, [(macro, wrong)]), '%MODEL')


@pytest.mark.parametrize(('model', 'size'), PARAMETERS)
def test_number_of_parameters(model, size):
    assert count_parameters(model, size) == PARAMETERS[model, size]


@pytest.mark.parametrize(('model', 'size', 'count'), SIZES_IN_HEADERS)
def test_number_of_parameters_of_sizes_in_headers(model, size, count):
    text = (CONFIGS / f'models/{model}.gin').read_text()
    line = re.search(rf'sizes/(\w+).gin with\n(?:#.*\n)*?#   (?:{size}: +)?(--gin.*)', text)
    macros = {name: int(value) for name, value in re.findall(r'--gin\.(\w+)=(\d+)', line[2])}
    assert count_parameters(model, line[1], **macros) == count


@pytest.mark.parametrize('model', MATCHED_MODELS)
def test_a_model_has_every_matched_size_with_the_parameters_of_t5(model):
    for size, difference in MATCHED_SIZES.items():
        assert count_parameters(model, size) == pytest.approx(PARAMETERS['t5_1_1', size], rel=difference), size


def test_no_model_or_size_is_left_out():
    models = {path.stem for path in (CONFIGS / 'models').glob('*.gin')}
    assert models == {model for model, _ in PARAMETERS}
    assert set(info_model.MODELS) == {*MATCHED_MODELS, 't5_1_1'}
    text = (ROOT / 'docs/architectures.md').read_text()
    assert [name for name in models if f'`{name}`' not in text] == [], 'models that docs/architectures.md does not name'
    text = (ROOT / 'docs/guide/configuration.md').read_text()
    for folder in ('models', 'sublayers', 'model_types', 'objectives', 'optimizers', 'hardware'):
        (row,) = re.findall(rf'^\| `{folder}/` \|.*', text, re.M)
        missing = [path.stem for path in (CONFIGS / folder).glob('[!_]*.gin') if f'`{path.stem}`' not in row]
        assert missing == [], f'files of configs/{folder} that the table in docs/guide/configuration.md does not name'
    assert {path.stem for path in (CONFIGS / 'sizes').glob('[!_]*.gin')} == {size for _, size in PARAMETERS}


def test_experiments_lack_only_the_settings_that_their_headers_require():
    files = sorted((CONFIGS / 'experiments').rglob('*.gin'))
    assert len(files) >= 13
    for path in files:
        header = path.read_text().split('include')[0]
        flags = [('MODEL_DIR', '/nowhere')]
        flags += [(macro, str(path)) for macro in ('FILES', 'PAIRS') if macro in header]
        if 'INITIAL_CHECKPOINT_PATH' in header:
            flags.append(('INITIAL_CHECKPOINT_PATH', '/nowhere'))
        loading.load_gin_config(
            loading.ConfigSources([str(path.relative_to(CONFIGS))], flags), train.ROOT, partial=False
        )


@pytest.mark.parametrize('model', [*MATCHED_MODELS, 't5_1_1', 't5_1_0', 'gpt2'])
def test_a_model_reads_all_of_its_parameters(model):
    """For example, a position bias in a stack without attention would be unused."""
    built, shapes = build_shapes(model, 'tiny')
    batch = batch_formats.get_abstract_batch(built.model_type)
    assert parameters.unread_params(built, nn.unbox(shapes), batch) == []


def test_any_encoder_mixer_goes_with_any_decoder_mixer():
    sublayers = (f'sublayers/{name}.gin' for name in ('hyper_mixer', 'mlp_mixer', 'linear_attention'))
    mixers = {
        'ENCODER_MIXER': '@encoder/hyper_mixer.HyperMixer',
        'DECODER_MIXER': '@mlp_mixer.WindowMixer',
        'DECODER_CROSS': '@linear_attention.LinearCrossAttention',
    }
    shapes = interface.compute_param_shapes(
        build_model('models/gmlp_mixer.gin', *sublayers, 'sizes/tiny.gin', **mixers), SHAPES
    )
    assert 'hyper_mixer' in shapes['encoder']['run_0']['layer']
    assert {'window_mixer', 'linear_cross_attention'} <= set(shapes['decoder']['run_0']['layer'])


IDENTITY = '@remixer_t5x.models.sublayers.hyper_mixer.Identity'
FEATURE_MIXING_ONLY = f'ENCODER_MIXER={IDENTITY}+DECODER_MIXER={IDENTITY}'
TOKEN_MIXING_ONLY = 'ENCODER_SUBLAYERS=(%ENCODER_MIXER,)+DECODER_SUBLAYERS=(%DECODER_MIXER, %DECODER_CROSS)'
TIM_ALL_LAYERS = 'ENCODER_RUNS=((@tim_encoder/layer.make_layer, %NUM_ENCODER_LAYERS),)'
SHARED_WEIGHT_VECTOR = 'GENERATED_WEIGHTS=@hyper_mixer.SharedWeightVector+TIED_HYPER_MIXER=False+TOKEN_INFORMATION=None'
ABLATIONS = [
    *(('hyper_mixer', change) for change in (FEATURE_MIXING_ONLY, TOKEN_MIXING_ONLY)),
    *(('hyper_mixer', SHARED_WEIGHT_VECTOR), ('hyper_mixer', 'TIED_HYPER_MIXER=False')),
    ('hyper_mixer', 'TOKEN_INFORMATION=@positions.LearnedPositions'),
    *(('remixer', f'COMPOSITION=@remixer.{name}') for name in ('NoComposition', 'GatedAlpha', 'GatedComposition')),
    *(('tim', TIM_ALL_LAYERS), ('tim', 'NUM_MECHANISMS=4'), ('tim', 'COMPETITION=None')),
]


@functools.cache
def param_shapes_by_name(model: str, size: str, change: str | None = None) -> dict[str, tuple[int, ...]]:
    files = gin_files.parse_model_flag(f'{model}+{change}' if change else model)
    (built,) = loading.load_macro_values(
        loading.ConfigSources(['models/t5_1_1.gin', f'sizes/{size}.gin'], model=files), 'MODEL'
    )
    params = nn.unbox(interface.compute_param_shapes(built, SHAPES))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize(('model', 'change'), ABLATIONS)
def test_every_ablation_changes_its_model(model, change):
    assert param_shapes_by_name(model, 'tiny', change) != param_shapes_by_name(model, 'tiny')


def test_the_alternative_scaled_remixer_has_the_papers_size_as_well():
    shapes = param_shapes_by_name('remixer_scaled', 'scaled_base', 'DECODER_FEED_FORWARD=@feed_forward.GatedMLP')
    assert sum(math.prod(shape) for shape in shapes.values()) == 223_973_394


def test_hyper_mixer_has_two_shared_weight_vectors():
    """Appendix C.2: "we create W_2 from a separate vector w_2"."""
    shapes = param_shapes_by_name('hyper_mixer', 'tiny', SHARED_WEIGHT_VECTOR)
    vectors = {path.split('/')[-2] for path in shapes if path.startswith('encoder') and path.endswith('vector')}
    assert vectors == {'w_in', 'w_out'}


def test_tim_in_all_layers_has_no_plain_layer():
    shapes = param_shapes_by_name('tim', 'tiny', TIM_ALL_LAYERS)
    encoder = [path for path in shapes if path.startswith('encoder')]
    assert {path.split('/')[1] for path in encoder if '/layer/' in path} == {'run_0'}
    assert not any('self_attention' in path for path in encoder)


@pytest.mark.parametrize(
    ('model', 'layouts'),
    [
        ('t5_1_1', ('PreNorm', 'PreNorm')),
        ('fnet', ('PostNorm', 'PreNorm')),
        ('hyper_mixer+LAYOUT=@layer.Serialized', ('Serialized', 'Serialized')),
        ('fnet+ENCODER_LAYOUT=@layer.Serialized', ('Serialized', 'PreNorm')),
    ],
)
def test_both_stacks_have_the_expected_layouts(model, layouts):
    sources = loading.ConfigSources(['models/t5_1_1.gin', 'sizes/tiny.gin'], model=gin_files.parse_model_flag(model))
    module = loading.load_macro_values(sources, 'MODEL')[0].module
    stacks = module.encoder_stack(), module.decoder_stack()
    assert tuple(type(factory()).__name__ for stack in stacks for factory, _ in stack.runs) == layouts


@pytest.mark.parametrize(
    ('file', 'line', 'instead'),
    [('models/fnet.gin', ('DECODER_MIXER', '@fnet.FNet'), 'SelfAttention'),
     ('models/mixer_enc.gin', ('DECODER_MIXER', '@mlp_mixer.MLPMixer'), 'WindowMixer')],
)  # fmt: skip
def test_noncausal_sublayers_are_rejected_when_a_decoder_is_built(file, line, instead):
    model = build_model(file, 'sizes/tiny.gin', **dict([line]))
    with pytest.raises(UserError, match=instead):
        interface.compute_param_shapes(model, SHAPES)


@pytest.mark.parametrize(('file', 'features'), [('models/bert.gin', 'inputs targets'), ('models/gpt2.gin', 'targets')])
def test_the_macro_in_the_error_about_long_rows_allows_them(file, features):
    model = build_model(file, 'sizes/tiny.gin')
    shapes = batch_formats.get_batch_shapes(model.model_type, dict.fromkeys(features.split(), 2048))
    with pytest.raises(UserError, match='2048 tokens') as caught:
        interface.compute_param_shapes(model, shapes)
    macro = 'MAX_TARGET_LENGTH' if model.model_type == 'decoder_only' else 'MAX_INPUT_LENGTH'
    assert macro in str(caught.value)
    interface.compute_param_shapes(build_model(file, 'sizes/tiny.gin', **{macro: 2048}), shapes)


def test_sublayers_without_packing_are_rejected_when_a_model_is_built():
    model = build_model('models/fnet.gin', 'sizes/tiny.gin')
    shapes = {**SHAPES, 'encoder_segment_ids': (1, 512), 'decoder_segment_ids': (1, 114)}
    with pytest.raises(UserError, match='pack'):
        interface.compute_param_shapes(model, shapes)
