"""What the BERTs and GPT-2s of Hugging Face have in common: one stack of layers, whose heads share the width."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.config import Refusal, shown

_ELSEWHERE = '--to_safetensors=FILE writes the parameters of any model'


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneStack:
    """The sizes of a model.

    Attributes:
        vocab_size: number of embeddings.
        embed_dim: width of the residual stream.
        mlp_dim: hidden units of the feed-forward.
        num_heads: attention heads, which share the width.
        num_layers: layers.
        max_length: learned positions.
        epsilon: epsilon of the norms.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_layers: int
    max_length: int
    epsilon: float

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    def check_heads(self, where: str, width: str, heads: str) -> None:
        """Raises UserError, with the file `where` and its names of the two numbers, unless heads divide the width."""
        if self.embed_dim % self.num_heads:
            raise UserError(
                f'{where} says {width} {self.embed_dim} and {heads} {self.num_heads}, which does not divide it'
            )


def check_allowed(config: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], where: str, published: str) -> None:
    """Raises UserError for a value of the config.json `where` that is not among those `allowed` for its name; the first
    of them is what a missing value means. `published` names the models that have them.
    """
    for name, values in allowed.items():
        found = config.get(name, values[0])
        if found not in values:
            raise UserError(
                f'{where} says {name} {shown(found)}; allowed is {values[0]!r}, as in published {published}'
            )


def gin_dimensions(sizes: OneStack) -> Iterator[str]:
    """Lines that set the macros of the sizes."""
    yield f'VOCAB_SIZE = {sizes.vocab_size}'
    yield f'EMBED_DIM = {sizes.embed_dim}'
    yield f'MLP_DIM = {sizes.mlp_dim}'
    yield f'NUM_HEADS = {sizes.num_heads}'
    yield f'HEAD_DIM = {sizes.head_dim}'
    # models/*.gin describe both sides.
    yield f'NUM_ENCODER_LAYERS = {sizes.num_layers}'
    yield f'NUM_DECODER_LAYERS = {sizes.num_layers}'


def gin_header(source: str, provides: str) -> Iterator[str]:
    """The first lines of the gin file of a converted model; `source` names the origin of the weights."""
    yield f'# {" ".join(source.split())}'
    yield '# Requires: nothing; give it after the data file, whose VOCABULARY it replaces.'
    yield f'# Provides: {provides}, and the dimensions.'


def require(holds: Any, kind: str, difference: str) -> None:
    """Raises Refusal unless `holds`: Hugging Face's `kind` does not have our model, because of `difference`."""
    if not holds:
        raise Refusal(f"Hugging Face's {kind} does not have this model: {difference}; {_ELSEWHERE}")


def part(factory: Any, wanted: type, kind: str, where: str) -> Any:
    """What the factory makes. Raises UserError where that is not a `wanted`."""
    made = factory() if factory is not None else None
    require(isinstance(made, wanted), kind, f'{where} is {type(made).__name__ if made is not None else None}')
    return made


def layer_sizes(stack: Any, layout: type, sublayers: tuple[type, type], norm: type, kind: str) -> dict[str, Any]:
    """`num_heads`, `mlp_dim` and `epsilon` of a stack whose layers are all equal, `head_dim` for the caller to check,
    and `approximate`, of its GELU.

    Calls factories for their attributes and does not trace anything. Raises UserError with the first part that differs.
    """
    found: dict[str, Any] = {}
    for factory, _ in stack.runs:
        layer = factory()
        made = [sublayer() for sublayer in layer.sublayers]
        for sublayer, wanted in zip(made, sublayers, strict=False):
            require(isinstance(sublayer, wanted), kind, f'a layer has the sublayer {type(sublayer).__name__}')
        require(len(made) == 2, kind, f'a layer has {len(made)} sublayers')
        attention, mlp = made
        require(isinstance(layer, layout), kind, f'the layout is {type(layer).__name__}')
        facts = {
            'num_heads': attention.num_heads,
            'head_dim': attention.head_dim,
            'mlp_dim': mlp.hidden_dim,
            'approximate': mlp.approximate,
            'epsilon': part(layer.norm, norm, kind, 'the norm of a layer').epsilon,
        }
        require(found in ({}, facts), kind, 'its layers have different sizes')
        found = facts
    require(stack.position_bias is None, kind, 'it has a position bias')
    return found
