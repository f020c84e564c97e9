"""Defines `ModelFamily`, the base class for converting config.json, parameters and tokenizers of Hugging Face models.

To add a family:
1. Subclass `ModelFamily` in a file in this folder, and add the class to `model_folders.FAMILIES`.
2. Add a random model to `MODELS` in tests/interop/test_transformers.py, which compares it with transformers, and a
   tokenizer to `FOLDERS` in test_tokenizers.py. Both require torch.
3. For tests without torch (test_families.py), add a tiny model to `CONFIGS` in tests/support/hf_folders.py, and record
   its arrays in tests/golden, as make_bert_gpt2_tiny.py does.
4. Describe the family in docs/interop.md.
"""

import abc
import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from flax import traverse_util

from remixer_t5x import tokenizer_files
from remixer_t5x.checkpoints import compatibility
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import param_mapping, tokenizer_export
from remixer_t5x.interop.huggingface.param_mapping import ModuleNames, ParamMapping, Params
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.interop.safetensors_files import Tensors

CONFIG = 'config.json'
# Conversion iterates over all layers, so layer counts from untrusted files need a limit.
MAX_LAYERS = 4096
# Numbers plus `ModelFamily.id_offset` must fit into int32.
MAX_NUMBER = 2**31 - 2
# The modules of remixer_t5x.models that gin texts of converted models import if they use them.
GIN_MODULES = (
    *('architecture.decoder_only', 'architecture.encoder_decoder', 'architecture.encoder_only'),
    *('layers.embedding', 'layers.norms', 'layers.positions', 'sublayers.attention'),
)


class HuggingFaceConfig:
    """The untrusted config.json in `folder`. Each value is validated when it is read."""

    def __init__(self, values: Mapping[str, Any], folder: str | pathlib.Path):
        self.values, self.folder, self.file = values, pathlib.Path(folder), f'{folder}/{CONFIG}'

    def setting_error(self, name: str, advice: str) -> UserError:
        """Returns a UserError for the invalid value of the setting `name`."""
        value = ascii(self.values.get(name))
        return UserError(f'{self.file} sets {name} to {value if len(value) <= 60 else value[:60] + "..."}; {advice}')

    def with_defaults(self, defaults: Mapping[str, Any]) -> 'HuggingFaceConfig':
        """Returns the configuration with the values of `defaults` for settings that are missing or null."""
        missing = {name: value for name, value in defaults.items() if self.values.get(name) is None}
        return HuggingFaceConfig({**self.values, **missing}, self.folder)

    def read_number(self, name: str, kind: Any = int, default: Any = None) -> Any:
        """Reads a number of the type `kind`: int, float, or `float | None` if null has a meaning.

        Integers must be positive, or not negative for token ids. Raises UserError for any other value.
        """
        value = self.values.get(name, default)
        if value is None and kind not in (int, float):
            return None
        value = default if value is None else value
        if kind is int:
            lowest, limit = int(not name.endswith('token_id')), MAX_LAYERS if 'layer' in name else MAX_NUMBER
            if type(value) is not int or not lowest <= value <= limit:
                raise self.setting_error(name, f'it must be an integer from {lowest} to {limit:,}')
            return value
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise self.setting_error(name, 'it must be a number above 0 and below 1e9')
        return float(value)

    def read_rope_theta(self, parameters: Any, name: str, default: float) -> float:
        """Reads the base of the rotary embedding from `rope_theta` in `parameters`, or from the setting `name`.

        transformers 5 writes `parameters`, and version 4 writes `name`. Raises UserError for other rotary embeddings.
        """
        values = parameters if isinstance(parameters, dict) else {}
        theta = values.get('rope_theta', self.values.get(name, default))
        if values.get('rope_type', 'default') != 'default' or type(theta) not in (int, float) or not 1 < theta < 1e9:
            raise self.setting_error(
                'rope_parameters', "rope_type must be 'default', and rope_theta a number between 1 and 1e9"
            )
        return float(theta)

    def check_layer_types(self, expected: list[str]) -> None:
        """Raises UserError if the setting `layer_types` of transformers 5 differs from `expected`."""
        if self.values.get('layer_types') not in (None, expected):
            raise self.setting_error('layer_types', f'it must be {", ".join(expected[:4])}, ...')

    def check_allowed_values(self, allowed: Mapping[str, Sequence[Any]]) -> None:
        """Raises UserError if a setting has a value that is not in `allowed`; missing settings are accepted."""
        for name, values in allowed.items():
            if self.values.get(name, values[0]) not in values:
                raise self.setting_error(name, f'it must be {" or ".join(map(repr, values))}, as in published models')


# The name of a function in `remixer_tasks.vocabularies` and its arguments, which create a vocabulary.
Tokenizer = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFamily(abc.ABC):
    """The sizes and settings of a Hugging Face model, and its conversion to and from remixer_t5x.

    The comparison with transformers uses these optional fields: `max_length` (maximum number of tokens), `bos_id`
    (start token of a decoder), `separator_id` and `layer_biases`. If a family has the field `eos_id`, the vocabulary
    must have the same end token.
    """

    model_types: ClassVar[tuple[str, ...]]
    # The model class in transformers, and the auto class that loads it.
    hf_class: ClassVar[str]
    auto_class: ClassVar[str]
    # The remixer_t5x model class.
    model_class: ClassVar[type]
    # The fields `num_encoder_layers` and `num_decoder_layers` contain the layer counts of the stacks.
    stack_names: ClassVar[tuple[str, ...]] = ('encoder',)
    # Dicts keyed by the settings of config.json. `sizes` maps numbers to the fields that contain them. `allowed` maps
    # settings to their supported values; the first value is the default and is written.
    sizes: ClassVar[Mapping[str, str]]
    allowed: ClassVar[Mapping[str, Sequence[Any]]]
    # The Hugging Face modules of the parameters. `id_offset` is the difference between remixer_t5x ids and Hugging Face
    # ids: 1 if Hugging Face's id 0 is not padding, so that our arrays over the vocabulary begin with a zero row.
    module_names: ClassVar[ModuleNames]
    attention_name: ClassVar[str] = 'self_attention'
    id_offset: ClassVar[int] = 0
    # The arrays that the tokenizer returns.
    tokenizer_outputs: ClassVar[tuple[str, ...]] = tokenizer_export.TOKENIZER_OUTPUTS
    # Optional arrays: `copies` maps duplicates to their originals, and `ignored` is a regex of array names to ignore.
    copies: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[str] = ''

    # Number of rows of Hugging Face's embedding table.
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    epsilon: float

    @classmethod
    def from_config(cls, config: HuggingFaceConfig) -> Self:
        """Reads config.json and checks it. Raises UserError for a feature that remixer_t5x does not support."""
        return cls(**cls.read_fields(config))

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        """Checks the settings in `allowed`, and returns the fields in `sizes` and the defaults of all others.

        Subclasses add their other fields.
        """
        config.check_allowed_values(cls.allowed)
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        # A classifier needs the default of `epsilon`, because `ClassifierFamily` declares the fields without defaults.
        fields: dict[str, Any] = {name: getattr(cls, name) for name in types if hasattr(cls, name)}
        fields |= {
            field: config.read_number(name, types[field], fields.get(field)) for name, field in cls.sizes.items()
        }
        for name, field in cls.sizes.items():
            if name.endswith('_token_id') and fields[field] >= fields['vocab_size']:
                raise config.setting_error(name, f'it must be less than vocab_size, {fields["vocab_size"]}')
        if 'head_dim' not in fields:
            if fields['embed_dim'] % fields['num_heads']:
                heads = next(name for name, field in cls.sizes.items() if field == 'num_heads')
                raise config.setting_error(heads, f'it must divide the width {fields["embed_dim"]}')
            fields['head_dim'] = fields['embed_dim'] // fields['num_heads']
        return fields

    def to_config(self) -> dict[str, Any]:
        """Returns the content of config.json, for transformers 4.50 to 5."""
        return {
            'architectures': [self.hf_class],
            'model_type': self.model_types[0],
            **{name: getattr(self, field) for name, field in self.sizes.items()},
            **{name: values[0] for name, values in self.allowed.items()},
        }

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        """Returns the fields of the equivalent Hugging Face model, except for the numbers of layers.

        `from_model` checks all other settings, and `find_equivalent_model` checks that config.json can represent the
        fields. Raises UnsupportedModelError if a required module is missing.
        """
        modules.require_condition(
            not cls.id_offset or getattr(vocabulary, 'shifted', False),
            f'VOCABULARY is a {type(vocabulary).__name__}, not a shifted vocabularies.huggingface_tokenizer',
        )
        stack = cls.stack_names[0]
        attention = modules.find_module(f'{stack}/layer/{cls.attention_name}')
        feed_forward = modules.find_module(*(f'{stack}/layer/{kind}_mlp' for kind in ('gated', 'relu', 'gelu')))
        return {
            'vocab_size': model.module.vocab_size - cls.id_offset,
            'embed_dim': model.module.embed_dim,
            'mlp_dim': feed_forward.hidden_dim,
            'num_heads': attention.num_heads,
            'head_dim': attention.head_dim,
            'epsilon': modules.find_module(f'{stack}/final_norm', 'input/norm').epsilon,
        }

    @classmethod
    def from_model(cls, model: Any, vocabulary: Any, modules: TracedModules, build: Callable[[str], Any]) -> Self:
        """Returns the equivalent Hugging Face model.

        `build` builds a model from gin text. Raises UnsupportedModelError if `modules` differ from those of the model
        that `build` creates.
        """
        fields = cls.read_model_fields(model, vocabulary, modules)
        family = cls(**fields, **{f'num_{stack}_layers': modules.count_layers(stack) for stack in cls.stack_names})
        modules.require_same_modules(build(family.build_gin_text('')))
        return family

    @property
    def layer_counts(self) -> dict[str, int]:
        """The number of layers of each stack ('encoder' or 'decoder')."""
        return {stack: getattr(self, f'num_{stack}_layers') for stack in self.stack_names}

    @property
    def query_factor(self) -> float:
        """The factor by which the query kernels of Hugging Face are multiplied."""
        return 1.0

    @property
    @abc.abstractmethod
    def gin_files(self) -> tuple[str, ...]:
        """The shipped gin files that configure the model, in order."""

    @abc.abstractmethod
    def build_gin_settings(self) -> dict[str, Any]:
        """Returns gin settings, except common sizes, that override `gin_files`. String values are gin expressions."""

    def find_tokenizer(self, folder: pathlib.Path, file: str | None) -> Tokenizer:
        """Returns the tokenizer in `file`, by default the one in `folder`. Raises UserError for a missing file.

        Subclasses whose tokenizer is not a tokenizer.json override this method.
        """
        path = pathlib.Path(file or folder / tokenizer_files.TOKENIZER)
        if not path.is_file():
            where = repr(str(path.parent))
            raise UserError(
                f'{path} does not exist; write it with transformers.AutoTokenizer.from_pretrained({where})'
                f'.save_pretrained({where}), or pass vocabulary=/path/to/{tokenizer_files.TOKENIZER} (--vocabulary in '
                'commands)'
            )
        return 'huggingface_tokenizer', {'path': str(path), 'shifted': bool(self.id_offset)}

    @property
    def max_lengths(self) -> dict[str, int] | None:
        """The maximum input and target lengths, or None if the model has no limit or `build_gin_settings` sets them."""
        return None

    @staticmethod
    def map_canonical_names(tensors: Tensors) -> dict[str, str]:
        """Maps the array names that `module_names` implies to the names in the file."""
        return {name: name for name in tensors}

    @classmethod
    def open_tensors(cls, folder: pathlib.Path) -> Tensors:
        """Opens the weights in `folder`. The name of a weight in a subfolder starts with `subfolder/`."""
        tensors = safetensors_files.open_weights_folder(folder, cls.auto_class)
        return {name: tensors[name_in_file] for name, name_in_file in cls.map_canonical_names(tensors).items()}

    def build_json_files(self) -> dict[str, Any]:
        """Returns config.json and the other JSON files of the model as a dict from paths to contents."""
        return {CONFIG: self.to_config()}

    def read_params(self, tensors: Tensors, abstract: Params, folder: str) -> Params:
        """Converts Hugging Face weights to remixer_t5x parameters in float32.

        `abstract` is the parameter tree of the model that `build_gin_text` configures, with ShapeDtypeStructs as
        leaves. Raises UserError if a weight is missing or unknown, or if its shape does not match config.json.
        """
        flat = traverse_util.flatten_dict(abstract, sep='/')
        mappings = self.map_params(abstract)
        expected = {
            name: mapping.find_huggingface_shape(flat[mapping.path].shape)
            for mapping in mappings
            for name in mapping.names
        }
        optional = {name for name in tensors if name in self.copies or re.fullmatch(self.ignored, name)}
        shapes = {name: array.shape for name, array in tensors.items() if name in expected or name not in optional}
        if difference := compatibility.describe_shape_difference(shapes, expected):
            raise UserError(
                f'the weights in {folder} do not fit its config.json: {difference}; use the complete folder of a '
                f'{self.hf_class}'
            )
        for copy, name in self.copies.items():
            if copy in tensors and copy not in expected and not np.array_equal(tensors[copy], tensors[name]):
                raise UserError(
                    f'{copy} differs from {name} in {folder}; {self.hf_class} ties these arrays, so they must be equal'
                )
        params = {mapping.path: mapping.to_flax(tensors) for mapping in mappings}
        return traverse_util.unflatten_dict(params, sep='/')

    def map_params(self, params: Params) -> list[ParamMapping]:
        """Maps each of `params` (arrays or ShapeDtypeStructs) to Hugging Face arrays."""
        return param_mapping.map_params(params, self.module_names, self.id_offset, self.query_factor)

    def convert_to_huggingface(self, params: Params) -> dict[str, np.ndarray]:
        """Converts `params` to a dict of named Hugging Face arrays, which are views if possible."""
        return param_mapping.convert_to_huggingface(self.map_params(params), params)

    def check_vocabulary(self, vocabulary: Any, folder: str) -> None:
        """Raises UserError if `vocabulary` is too large or its end token differs from that of the model in `folder`."""
        advice = 'pass the vocabulary of this model'
        rows = self.vocab_size + self.id_offset
        if vocabulary.vocab_size > rows:
            raise UserError(
                f'the vocabulary has {vocabulary.vocab_size} ids, but the model in {folder} has {rows}; {advice}'
            )
        eos_id = getattr(self, 'eos_id', vocabulary.eos_id)
        if vocabulary.eos_id != eos_id:
            raise UserError(
                f'{folder}/config.json sets eos_token_id to {eos_id}, but the vocabulary uses {vocabulary.eos_id}; '
                f'{advice}'
            )

    def build_gin_text(self, origin: str) -> str:
        """Returns the text of the model's gin file. The first line is a comment with `origin`, the weights' source."""
        depth = max(self.layer_counts.values())
        settings = {
            'VOCAB_SIZE': self.vocab_size + self.id_offset,
            'EMBED_DIM': self.embed_dim,
            'MLP_DIM': self.mlp_dim,
            'NUM_HEADS': self.num_heads,
            'HEAD_DIM': self.head_dim,
            # sizes/_common.gin sets both macros, even for models with a single stack.
            'NUM_ENCODER_LAYERS': self.layer_counts.get('encoder', depth),
            'NUM_DECODER_LAYERS': self.layer_counts.get('decoder', depth),
            **self.build_gin_settings(),
        }
        lines = [f'{name} = {value if isinstance(value, str) else repr(value)}' for name, value in settings.items()]
        modules = [name for name in GIN_MODULES if f'{name.rpartition(".")[2]}.' in ' '.join(lines)]
        imports = [f'from remixer_t5x.models.{name.replace(".", " import ")}' for name in modules]
        return '\n'.join([
            f'# {" ".join(origin.split())}',
            '# Requires: nothing; pass it after the data file, whose VOCABULARY it replaces.',
            '# Provides: MODEL, VOCAB_SIZE, VOCABULARY, and the dimensions.',
            *(f"include '{file}'" for file in self.gin_files),
            "include 'sizes/_common.gin'",
            'from __gin__ import dynamic_registration',
            *imports,
            '',
            *lines,
            '',
        ])  # fmt: skip
