"""Converts T5, T5 v1.1, mT5, ByT5, umT5 and their encoders between Hugging Face and models/t5_1_*.gin.

Source: `T5Config`, `MT5Config` and `UMT5Config` of transformers 4 and 5. As in published models, the output projection
of a T5 without gate is tied to the embedding, with an input scaled by d_model ** -0.5, and that of a gated T5 is
neither tied nor scaled. In version 4, `tie_word_embeddings` determines both. In version 5, `scale_decoder_outputs`
determines the scale, and umT5 is always scaled, regardless of config.json; for umT5, this module follows version 4.

Also converts sentence-T5 (Ni et al. 2021), stored in the format of sentence-transformers. The model consists of a T5
encoder, mean pooling over tokens, a linear projection, and L2 normalization.

    modules.json             the list of modules, in order
    config.json, ...         the T5 encoder (`T5EncoderModel`), including its weights and tokenizer
    1_Pooling, 2_Dense       config.json of each module, and model.safetensors with the projection

Source: `Pooling`, `Dense` and `Normalize` of sentence-transformers 2 to 6.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import t5_tokenizer
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig, ModelFamily
from remixer_t5x.interop.huggingface.param_mapping import HuggingFaceModule
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.interop.safetensors_files import Tensors
from remixer_t5x.models.masked_lm import MaskedLM
from remixer_t5x.models.seq2seq import Seq2Seq

UMT5 = 'umt5'
EMBEDDING_TABLE, OUTPUT_WEIGHT = 'shared.weight', 'lm_head.weight'
# The settings that determine whether the decoder output is scaled, in order of precedence.
OUTPUT_SETTINGS = ('scale_decoder_outputs', 'tie_word_embeddings')
TABLE_COPIES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# Maps `feed_forward_proj` to the activation of the gate in remixer_t5x, or to None for a feed-forward without a gate.
FEED_FORWARDS = {'relu': None, 'gated-gelu': 'gelu', 'gated-silu': 'silu'}
SENTENCE_MODULES, SENTENCE_SETTINGS, MODULE_CONFIG = 'modules.json', 'sentence_bert_config.json', 'config.json'
POOLING, DENSE = '1_Pooling', '2_Dense'
# Maps the folder of each module in modules.json to its class name.
SENTENCE_LAYOUT = {'': 'Transformer', POOLING: 'Pooling', DENSE: 'Dense', '3_Normalize': 'Normalize'}
IDENTITY = 'torch.nn.modules.linear.Identity'


def _list_module_names() -> Iterator[tuple[str, str | HuggingFaceModule]]:
    yield 'token_embedder', 'shared'
    yield 'logits', 'lm_head'
    yield 'sentence/dense', f'{DENSE}/linear'
    for side, last in (('encoder', 1), ('decoder', 2)):
        ours, theirs, bias = f'{side}/layer', f'{side}.block.{{}}.layer', 'SelfAttention.relative_attention_bias'
        yield f'{side}/final_norm', f'{side}.final_layer_norm'
        yield f'{side}/position_bias', HuggingFaceModule(f'{side}.block.0.layer.0.{bias}', transposed=True)
        yield f'{ours}/self_attention/position_bias', HuggingFaceModule(f'{theirs}.0.{bias}', transposed=True)
        for index, (name, module) in enumerate((('self', 'SelfAttention'), ('cross', 'EncDecAttention'))):
            yield f'{ours}/{name}_attention_norm', f'{theirs}.{index}.layer_norm'
            for part in ('query', 'key', 'value', 'out'):
                yield f'{ours}/{name}_attention/{part}', f'{theirs}.{index}.{module}.{part[0]}'
        for kind, part in (('gated', 'wi_0'), ('gated', 'wi_1'), ('gated', 'wo'), ('relu', 'wi'), ('relu', 'wo')):
            yield f'{ours}/{kind}_mlp/{part}', f'{theirs}.{last}.DenseReluDense.{part}'
            yield f'{ours}/{kind}_mlp_norm', f'{theirs}.{last}.layer_norm'


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Encoder(ModelFamily):
    """A T5 encoder (`T5EncoderModel`), converted to a masked language model without a head.

    Attributes:
        activation: activation of the feed-forward's gate ('gelu' in T5 v1.1, 'silu' in UL2); None for the original T5,
            whose feed-forward has no gate.
        layer_biases: whether each layer has a separate position bias, as in umT5, instead of one per stack.
    """

    model_types = ('t5', 'mt5', UMT5)
    hf_class = 'T5EncoderModel'
    auto_class = 'AutoModelForTextEncoding'
    model_class: ClassVar[type] = MaskedLM
    sizes = {
        'vocab_size': 'vocab_size',
        'd_model': 'embed_dim',
        'd_ff': 'mlp_dim',
        'd_kv': 'head_dim',
        'num_heads': 'num_heads',
        'num_layers': 'num_encoder_layers',
        'eos_token_id': 'eos_id',
    }
    # All published T5 models have these numbers, and these ids are the special ids of remixer_t5x.
    allowed = {
        'relative_attention_num_buckets': (32,),
        'relative_attention_max_distance': (128,),
        'layer_norm_epsilon': (1e-6,),
        'is_encoder_decoder': (False, True),
        'feed_forward_proj': tuple(FEED_FORWARDS),
        'decoder_start_token_id': (0, None),
        'pad_token_id': (0, None),
    }
    copies = dict.fromkeys(TABLE_COPIES[:1], EMBEDDING_TABLE)
    module_names = dict(_list_module_names())

    num_encoder_layers: int
    activation: str | None
    epsilon: float = 1e-6
    layer_biases: bool = False
    eos_id: int = 1

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        fields = super().read_fields(config)
        activation = FEED_FORWARDS[config.values.get('feed_forward_proj', 'relu')]
        return {**fields, 'activation': activation, 'layer_biases': config.values['model_type'] == UMT5}

    def to_config(self) -> dict[str, Any]:
        config = {
            **super().to_config(),
            'feed_forward_proj': next(n for n, value in FEED_FORWARDS.items() if value == self.activation),
        }
        if self.layer_biases:
            config |= {'architectures': [f'UM{self.hf_class}'], 'model_type': UMT5}
        return config

    @staticmethod
    def map_canonical_names(tensors: Tensors) -> dict[str, str]:
        names = {name: name for name in tensors}
        # Some files contain the embedding table only under its name in the encoder or decoder.
        for copy in TABLE_COPIES:
            if EMBEDDING_TABLE not in names and copy in names:
                names[EMBEDDING_TABLE] = copy
        return names

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        fields = super().read_model_fields(model, vocabulary, modules)
        feed_forward = modules.find_module('encoder/layer/gated_mlp', 'encoder/layer/relu_mlp')
        activation = getattr(feed_forward, 'activation', None)
        modules.require_condition(activation in FEED_FORWARDS.values(), f'ACTIVATION is {activation!r}')
        return fields | {
            'activation': activation,
            'layer_biases': 'encoder/layer/self_attention/position_bias' in modules,
            'eos_id': int(vocabulary.eos_id or 1),
        }

    @property
    def gin_files(self) -> tuple[str, ...]:
        return ('models/t5_1_1.gin' if self.activation else 'models/t5_1_0.gin', 'model_types/encoder_only.gin')

    def build_gin_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self.activation not in (None, 'gelu'):
            settings['ACTIVATION'] = repr(self.activation)
        if self.layer_biases:
            settings |= dict.fromkeys(('ENCODER_POSITION_BIAS', 'DECODER_POSITION_BIAS'))
            settings['attention.SelfAttention.position_bias'] = '@positions.RelativePositionBias'
        return settings

    find_tokenizer = staticmethod(t5_tokenizer.find_t5_tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5(T5Encoder):
    """A T5 encoder-decoder."""

    hf_class = 'T5ForConditionalGeneration'
    auto_class = 'AutoModelForSeq2SeqLM'
    model_class = Seq2Seq
    stack_names = ('encoder', 'decoder')
    sizes = {**T5Encoder.sizes, 'num_decoder_layers': 'num_decoder_layers'}
    allowed = {**T5Encoder.allowed, 'is_encoder_decoder': (True,)}
    copies = dict.fromkeys((*TABLE_COPIES, OUTPUT_WEIGHT), EMBEDDING_TABLE)
    # Ignores an unused array that Hugging Face's original T5 converter wrote.
    ignored = r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight'

    num_decoder_layers: int

    @staticmethod
    def map_canonical_names(tensors: Tensors) -> dict[str, str]:
        names = T5Encoder.map_canonical_names(tensors)
        # transformers 5 ties the output of every T5 unless the file contains an output matrix.
        if EMBEDDING_TABLE in names:
            names.setdefault(OUTPUT_WEIGHT, names[EMBEDDING_TABLE])
        return names

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        fields = super().read_fields(config.with_defaults({'num_decoder_layers': config.values.get('num_layers')}))
        setting = next((name for name in OUTPUT_SETTINGS if name in config.values), OUTPUT_SETTINGS[-1])
        is_scaled = config.values.get(setting) is not False
        if is_scaled != (fields['activation'] is None) and config.values['model_type'] != 'mt5':
            raise config.setting_error(
                setting, f'it must be {not is_scaled} with this feed_forward_proj, as in published models'
            )
        return fields

    def to_config(self) -> dict[str, Any]:
        return {**super().to_config(), 'tie_word_embeddings': self.activation is None}

    def build_json_files(self) -> dict[str, Any]:
        ids = {'decoder_start_token_id': 0, 'eos_token_id': self.eos_id, 'pad_token_id': 0}
        return {**super().build_json_files(), 'generation_config.json': ids}

    @property
    def gin_files(self) -> tuple[str, ...]:
        return super().gin_files[:1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceT5(T5Encoder):
    """A T5 encoder with mean pooling and a linear projection to `sentence_dim` features."""

    sentence_dim: int
    max_length: int = 512

    @classmethod
    def open_tensors(cls, folder: pathlib.Path) -> Tensors:
        modules = untrusted_files.read_json_list(folder / SENTENCE_MODULES)
        types = [str(module.get('type') if isinstance(module, dict) else module) for module in modules]
        kinds = [name.rpartition('.')[2] for name in types]
        if kinds != [*SENTENCE_LAYOUT.values()]:
            raise UserError(
                f'{folder / SENTENCE_MODULES} must list the modules {", ".join(SENTENCE_LAYOUT.values())}, got '
                f'{", ".join(kinds)!a:.100}; use the folder of a sentence-T5 model'
            )
        dense = safetensors_files.open_weights_folder(folder / DENSE, cls.auto_class)
        return {**super().open_tensors(folder), **{f'{DENSE}/{name}': array for name, array in dense.items()}}

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        folder = config.folder
        pooling, dense = (
            HuggingFaceConfig(untrusted_files.read_json_object(folder / name / MODULE_CONFIG), folder / name)
            for name in (POOLING, DENSE)
        )
        # Before version 6, sentence-transformers used a separate flag for each pooling mode.
        for name, value in pooling.values.items():
            if name.startswith('pooling_mode') and value not in ('mean', name == 'pooling_mode_mean_tokens'):
                raise pooling.setting_error(name, 'the pooling mode must be mean')
        dense.check_allowed_values({'bias': (False,), 'activation_function': (IDENTITY,), 'use_residual': (False,)})
        file = folder / SENTENCE_SETTINGS
        settings = HuggingFaceConfig(untrusted_files.read_json_object(file) if file.is_file() else {}, folder)
        return {
            **super().read_fields(config),
            'sentence_dim': dense.read_number('out_features'),
            'max_length': settings.read_number('max_seq_length', default=512),
        }

    def build_json_files(self) -> dict[str, Any]:
        return {
            **super().build_json_files(),
            SENTENCE_MODULES: [
                {'idx': index, 'name': str(index), 'path': path, 'type': f'sentence_transformers.models.{name}'}
                for index, (path, name) in enumerate(SENTENCE_LAYOUT.items())
            ],
            SENTENCE_SETTINGS: {'max_seq_length': self.max_length, 'do_lower_case': False},
            f'{POOLING}/{MODULE_CONFIG}': {
                'word_embedding_dimension': self.embed_dim,
                'pooling_mode_mean_tokens': True,
            },
            f'{DENSE}/{MODULE_CONFIG}': {
                'in_features': self.embed_dim,
                'out_features': self.sentence_dim,
                'bias': False,
                'activation_function': IDENTITY,
            },
        }

    @property
    def max_lengths(self) -> dict[str, int]:
        return {'inputs': self.max_length, 'targets': self.max_length}

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        projection = modules.find_module('sentence')
        sizes = {'sentence_dim': projection.outputs, 'max_length': projection.max_length}
        return super().read_model_fields(model, vocabulary, modules) | sizes

    def build_gin_settings(self) -> dict[str, Any]:
        return {
            **super().build_gin_settings(),
            'TASK_FEATURE_LENGTHS': self.max_lengths,
            'encoder_only.EncoderOnly.sentence_layer': '@encoder_only.SentenceProjection',
            'encoder_only.SentenceProjection.outputs': self.sentence_dim,
            'encoder_only.SentenceProjection.max_length': self.max_length,
        }
