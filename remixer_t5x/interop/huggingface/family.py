"""A model family of Hugging Face: sizes, the table of parameters, gin settings, and inputs to compare logits with.

A family is a file of this folder with a subclass of `Family`, which `folders.FAMILIES` lists. The laws of
tests/interop/test_families.py hold for it once `tests/support/hf_folders.py` has a recorded tiny model.
"""

import abc
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import table
from remixer_t5x.interop.huggingface.table import Params, Row, Runs
from remixer_t5x.interop.safetensors.files import Tensors

# Every layer is looked up among the weights, so numbers from a file need a limit.
MAX_LAYERS = 4096
MAX_NUMBER = 2**31 - 1


class Config:
    """The content of the config.json in `folder`, from anybody: each value is checked when it is read."""

    def __init__(self, values: Mapping[str, Any], folder: str):
        self.values, self.file = values, f'{folder}/config.json'

    def error(self, name: str, advice: str) -> UserError:
        """The error for the value of `name`, which it shows on one line."""
        value = ascii(self.values.get(name))
        return UserError(f'{self.file} says {name} {value if len(value) <= 60 else value[:60] + "..."}; {advice}')

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number. Raises UserError for anything else."""
        value = default if self.values.get(name) is None else self.values[name]
        limit = MAX_LAYERS if 'layer' in name else MAX_NUMBER
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self.error(name, f'it must be a positive whole number up to {limit:,}')
        return value

    def epsilon(self, name: str, default: float | None = None) -> float:
        """A number between 0 and 1. Raises UserError for anything else."""
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
            raise self.error(name, 'it must be a number between 0 and 1')
        return float(value)

    def allow(self, allowed: Mapping[str, Sequence[Any]]) -> None:
        """Raises UserError for a value that is not among those allowed; the first is the default of a missing one."""
        for name, values in allowed.items():
            if self.values.get(name, values[0]) not in values:
                raise self.error(name, f'it must be {" or ".join(map(repr, values))}, as in published models')


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary of the files in Hugging Face's folder: the function of `remixer_tasks.vocabularies`, its arguments,
    and its name in errors.
    """

    function: str
    arguments: Mapping[str, Any]
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family(abc.ABC):
    """One model of a family.

    Attributes:
        vocab_size: rows of Hugging Face's table of embeddings.
        embed_dim: width of the residual stream.
        mlp_dim: hidden units of the feed-forward.
        num_heads: attention heads.
        head_dim: width of a head.
        epsilon: epsilon of the norms.
    """

    kind: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    # transformers' class, and the class that loads it.
    hf_class: ClassVar[str]
    auto_class: ClassVar[str]
    # The class of our model, and modules of remixer_t5x.models that `settings` names.
    model_class: ClassVar[type]
    gin_modules: ClassVar[tuple[str, ...]]
    # By key of config.json: the name of our field, and the supported values, of which the first is written.
    sizes: ClassVar[Mapping[str, str]]
    allowed: ClassVar[Mapping[str, Sequence[Any]]]
    # What is written into config.json in addition.
    constants: ClassVar[Mapping[str, Any]] = {}
    # Further arrays of a file, as `table.check` takes them.
    copies: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[str] = ''

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    epsilon: float

    @classmethod
    def from_config(cls, config: Config, tensors: Tensors) -> Self:
        """The model in a folder. Raises UserError for a part that our models do not have."""
        return cls(**cls.read_sizes(config))

    @classmethod
    def read_sizes(cls, config: Config, **defaults: int) -> dict[str, Any]:
        """Checks `allowed` and reads the sizes by field; missing ones are `defaults`, or the defaults of the fields."""
        config.allow(cls.allowed)
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        defaults = {name: value for name, value in fields.items() if value is not dataclasses.MISSING} | defaults
        sizes: dict[str, Any] = {}
        for name, field in cls.sizes.items():
            sizes[field] = (config.epsilon if field == 'epsilon' else config.number)(name, defaults.get(field))
        if 'head_dim' not in sizes:
            if sizes['embed_dim'] % sizes['num_heads']:
                heads = next(name for name, field in cls.sizes.items() if field == 'num_heads')
                raise config.error(heads, f'it must divide the width {sizes["embed_dim"]}')
            sizes['head_dim'] = sizes['embed_dim'] // sizes['num_heads']
        return sizes

    def to_config(self) -> dict[str, Any]:
        """The content of a config.json, for transformers 4.50 to 5."""
        return {
            'architectures': [self.hf_class],
            'model_type': self.model_types[0],
            **{name: getattr(self, field) for name, field in self.sizes.items()},
            **{name: values[0] for name, values in self.allowed.items()},
            **self.constants,
        }

    @classmethod
    @abc.abstractmethod
    def describe(cls, model: Any, vocabulary: Any) -> tuple[Self, Runs]:
        """Describes a model of ours, and the lengths of its runs of layers. Raises Refusal if the family lacks it.

        Calls factories for their attributes and does not trace anything.
        """

    @property
    @abc.abstractmethod
    def layers(self) -> dict[str, int]:
        """Number of layers, by stack."""

    @abc.abstractmethod
    def rows(self) -> Iterator[Row]:
        """The table of parameters."""

    @property
    @abc.abstractmethod
    def model_file(self) -> str:
        """The shipped gin file of our model."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The gin settings that differ from `model_file`, besides the common sizes; text is gin, not a string."""

    @abc.abstractmethod
    def tokenizer(self, folder: pathlib.Path, file: str | None) -> Tokenizer:
        """The tokenizer in `folder`; `file` replaces it. Raises UserError if there is none that we can read."""

    @abc.abstractmethod
    def write_tokenizer(self, vocabulary: Any, folder: pathlib.Path) -> str:
        """Writes the files of the tokenizer, and returns their names."""

    @abc.abstractmethod
    def random_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Arguments of transformers' model, [rows, length] int32; 0 in `input_ids` is padding."""

    @abc.abstractmethod
    def our_logits(self, model: Any, params: Params, inputs: Mapping[str, np.ndarray]) -> Any:
        """The logits of our model for `random_inputs`, [rows, length, vocab_size]."""

    @property
    def lengths(self) -> dict[str, int] | None:
        """The longest inputs and targets, if the model limits them and `settings` does not have them."""
        return None

    @staticmethod
    def canonical_names(tensors: Tensors) -> dict[str, str]:
        """The names in the file by the names in the table."""
        return {name: name for name in tensors}

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if the model needs none."""
        return {}

    def reference_settings(self) -> dict[str, Any]:
        """The settings of transformers' configuration that it must not take from the folder."""
        return {}

    def one_run(self) -> Runs:
        """All layers of a stack in one run, as in models/*.gin."""
        return {stack: (count,) for stack, count in self.layers.items()}

    def read(self, tensors: Tensors, folder: str) -> Params:
        """Reads our parameters, float32. Raises UserError if a weight is missing, unknown, or of another shape."""
        rows, runs, tensors = list(self.rows()), self.one_run(), tensors.renamed(self.canonical_names(tensors))
        table.check(rows, runs, tensors, folder, self.hf_class, self.copies, self.ignored)
        return table.read(rows, runs, tensors)

    def write(self, params: Params, runs: Runs) -> dict[str, np.ndarray]:
        """Hugging Face's arrays by name, as views of `params` if possible."""
        return table.write(self.rows(), runs, params)

    def first_difference(self, tensors: Tensors, params: Params, runs: Runs) -> str | None:
        """Hugging Face's name of a weight in `tensors` that differs in `params`; None if all are equal."""
        tensors = tensors.renamed(self.canonical_names(tensors))
        arrays = table.write(self.rows(), runs, params)
        return next((name for name, array in arrays.items() if not np.array_equal(array, tensors[name])), None)

    def check_vocabulary(self, vocabulary: Any, name: str, folder: str) -> None:
        """Raises UserError if `vocabulary` cannot belong to the model in `folder`."""
        advice = 'give the vocabulary of this model by --vocabulary'
        rows = self.settings().get('VOCAB_SIZE', self.vocab_size)
        if vocabulary.vocab_size > rows:
            raise UserError(f'{name} has {vocabulary.vocab_size} ids, and the model in {folder} has {rows}; {advice}')
        eos_id = self.generation_config().get('eos_token_id', vocabulary.eos_id)
        if vocabulary.eos_id != eos_id:
            raise UserError(
                f'{folder}/config.json says eos_token_id {eos_id}, and {name} has {vocabulary.eos_id}; {advice}'
            )

    def gin_text(self, origin: str) -> str:
        """The gin statements of MODEL and VOCAB_SIZE; `origin` says where the weights come from."""
        depth = max(self.layers.values())
        settings = {
            'VOCAB_SIZE': self.vocab_size,
            'EMBED_DIM': self.embed_dim,
            'MLP_DIM': self.mlp_dim,
            'NUM_HEADS': self.num_heads,
            'HEAD_DIM': self.head_dim,
            # models/*.gin describe both sides.
            'NUM_ENCODER_LAYERS': self.layers.get('encoder', depth),
            'NUM_DECODER_LAYERS': self.layers.get('decoder', depth),
            **self.settings(),
        }
        lines = [f'{name} = {value if isinstance(value, str) else repr(value)}' for name, value in settings.items()]
        modules = [name for name in self.gin_modules if f'{name.rpartition(".")[2]}.' in ' '.join(lines)]
        imports = [f'from remixer_t5x.models.{name.replace(".", " import ")}' for name in modules]
        return '\n'.join([
            f'# {" ".join(origin.split())}',
            '# Requires: nothing; give it after the data file, whose VOCABULARY it replaces.',
            '# Provides: MODEL, VOCAB_SIZE, VOCABULARY, and the dimensions.',
            f"include '{self.model_file}'",
            "include 'sizes/_common.gin'",
            'from __gin__ import dynamic_registration',
            *imports,
            '',
            *lines,
            '',
        ])  # fmt: skip
