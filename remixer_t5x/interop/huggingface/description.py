"""Describes a model of ours as a Hugging Face T5. Most models that our gin files can describe are not one."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from remixer_t5x.interop.huggingface.config import T5, Dimensions, Refusal
from remixer_t5x.interop.huggingface.weights import Runs
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.norms import RMSNorm
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.gated_mlp import GatedMLP
from remixer_t5x.models.sublayers.relu_mlp import ReluMLP

FEED_FORWARD = (GatedMLP, ReluMLP)
# The sublayers of a layer, in order.
SUBLAYERS = {'encoder': (SelfAttention, FEED_FORWARD), 'decoder': (SelfAttention, CrossAttention, FEED_FORWARD)}
_INSTEAD = '--to_safetensors=FILE writes the parameters of any model'


def describe(module: EncoderDecoder) -> tuple[T5, Runs]:
    """The Hugging Face architecture of `module`, and the lengths of its runs of layers.

    Calls factories for their attributes and does not trace anything. Raises Refusal with the first part that Hugging
    Face's T5 does not have.
    """
    facts = _Facts()
    stacks = {'encoder': module.encoder_stack(), 'decoder': module.decoder_stack()}
    # The parts that people swap come first, because they say most.
    for side, stack in stacks.items():
        for factory, _ in stack.runs:
            _describe_layer(facts, side, factory)
    for side, stack in stacks.items():
        _describe_stack(facts, side, stack)
    runs = {side: tuple(count for _, count in stack.runs) for side, stack in stacks.items()}
    dimensions = Dimensions(
        vocab_size=module.vocab_size,
        embed_dim=module.embed_dim,
        mlp_dim=facts.known['hidden_dim'],
        num_heads=facts.known['num_heads'],
        head_dim=facts.known['head_dim'],
        num_encoder_layers=sum(runs['encoder']),
        num_decoder_layers=sum(runs['decoder']),
    )
    t5 = T5(
        dimensions,
        gated=facts.known['feed_forward'] is GatedMLP,
        tied=module.tied,
        scaled_output=module.scaled_output,
        num_buckets=facts.known['num_buckets'],
        max_distance=facts.known['max_distance'],
        epsilon=facts.known['epsilon'],
        own_biases=facts.known['own_biases'],
    )
    return t5, runs


class _Facts:
    """The values found in a model so far; Hugging Face has one value of each for the whole model."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def learn(self, name: str, value: Any, where: str) -> None:
        if self.known.setdefault(name, value) != value:
            raise _refusal(f'{name} is {_shown(value)} in {where} and {_shown(self.known[name])} before it')

    def part(self, factory: Callable[..., Any] | None, allowed: type | tuple[type, ...], where: str) -> Any:
        """An instance made by `factory`, whose class must be in `allowed`."""
        made = factory() if factory is not None else None
        if not isinstance(made, allowed):
            raise _refusal(f'{where} is {type(made).__name__ if made is not None else None}')
        return made


def _describe_stack(facts: _Facts, side: str, stack: Stack) -> None:
    where = f'the {side}'
    if stack.position_embedding is not None:
        raise _refusal(f'{where} adds a position embedding')
    if not facts.known['own_biases']:
        _describe_bias(facts, stack.position_bias, f'the position bias of {where}')
    elif stack.position_bias is not None:
        raise _refusal(f'{where} and its layers have position biases')
    _describe_norm(facts, stack.final_norm, f'the final norm of {where}')


def _describe_bias(facts: _Facts, factory: Callable[..., nn.Module] | None, where: str) -> None:
    bias = facts.part(factory, RelativePositionBias, where)
    for name in ('num_heads', 'num_buckets', 'max_distance'):
        facts.learn(name, getattr(bias, name), where)


def _describe_layer(facts: _Facts, side: str, factory: Callable[..., nn.Module]) -> None:
    layer = factory()
    wanted, made = SUBLAYERS[side], [sublayer() for sublayer in layer.sublayers]
    fits = len(made) == len(wanted) and all(isinstance(m, w) for m, w in zip(made, wanted, strict=True))
    if not fits:
        names = [type(m).__name__ for m in made]
        known = {SelfAttention, CrossAttention, *FEED_FORWARD} if side == 'decoder' else {SelfAttention, *FEED_FORWARD}
        foreign = [type(m).__name__ for m in made if not isinstance(m, tuple(known))]
        raise _refusal(
            f'a layer of the {side} has the sublayer {foreign[0]}' if foreign else f'a layer of the {side} is {names}'
        )
    if not isinstance(layer, PreNorm):
        raise _refusal(f'the layout of the {side} is {type(layer).__name__}')
    _describe_norm(facts, layer.norm, f'the norm of the {side}')
    for sublayer in made:
        where = f'{type(sublayer).__name__} of the {side}'
        if isinstance(sublayer, FEED_FORWARD):
            facts.learn('feed_forward', GatedMLP if isinstance(sublayer, GatedMLP) else ReluMLP, where)
            facts.learn('hidden_dim', sublayer.hidden_dim, where)
        else:
            facts.learn('num_heads', sublayer.num_heads, where)
            facts.learn('head_dim', sublayer.head_dim, where)
        if isinstance(sublayer, SelfAttention):
            facts.learn('own_biases', sublayer.position_bias is not None, where)
            if sublayer.position_bias is not None:
                _describe_bias(facts, sublayer.position_bias, f'the position bias of {where}')


def _describe_norm(facts: _Facts, factory: Callable[..., nn.Module] | None, where: str) -> None:
    facts.learn('epsilon', facts.part(factory, RMSNorm, where).epsilon, where)


def _shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _refusal(difference: str) -> Refusal:
    return Refusal(f"Hugging Face's T5 does not have this model: {difference}; {_INSTEAD}")
