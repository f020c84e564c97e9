"""PyTorch models of remixer_t5x, for transformers:
`AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)`.

This file only requires torch and transformers, and is exported together with the weights. config.json describes a tree
of modules: the class, the settings and the parameter shapes of each module. `CLASSES` maps class names to the PyTorch
classes. Parameters use the names and layouts of the Flax model, with a separate module for each layer.

Generation does not use a key-value cache: each new token requires a forward pass over the whole prefix. Dropout is not
applied.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutput,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

# Logit of the padding token, which must never be predicted.
PADDING_LOGIT = -1e3


@dataclasses.dataclass
class SequenceContext:
    """The masks, position bias and encoder output for a [batch, length] array of tokens, padded at the end of each row.

    Attributes:
        mask: [batch, length] bool, False at padding.
        causal: whether each token attends only to itself and earlier tokens.
        bias: position bias [1, heads, query, key] to add to the self-attention logits, or None.
        memory: the encoder's output [batch, memory_length, embed] and its mask, or None.
    """

    mask: Tensor
    causal: bool = False
    bias: Tensor | None = None
    memory: Any = None

    @property
    def visibility_mask(self) -> Tensor:
        """The attention mask, [batch, 1, query, key] bool, True where a query may attend to a key."""
        visible = self.mask[:, None, None, :]
        return visible & torch.ones_like(self.mask[0].outer(self.mask[0])).tril() if self.causal else visible

    @property
    def positions(self) -> Tensor:
        """The position of each token, [length] float32."""
        return torch.arange(self.mask.shape[1], device=self.mask.device, dtype=torch.float32)

    @property
    def token_distances(self) -> Tensor:
        """The absolute distance between each query and key, [query, key] float32."""
        return (self.positions[:, None] - self.positions).abs()


class BaseModule(nn.Module):
    """A module created from its entry in config.json; `settings` contains the settings in that entry."""

    def __init__(self, spec: dict):
        super().__init__()
        self.settings = {name: value for name, value in spec.items() if name not in ('params', 'children', 'order')}
        for name, shape in spec.get('params', {}).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        for name in spec.get('order', ()):
            self.add_module(name, build_module(spec['children'][name]))

    def check_max_length(self, length: int) -> None:
        limit = self.settings['max_length']
        if length > limit:
            raise ValueError(f'{type(self).__name__} accepts rows of at most {limit} tokens, got {length}')


def build_module(spec: dict) -> BaseModule:
    """Creates the module described by an entry of config.json."""
    return CLASSES[spec['class']](spec)


def gelu(x: Tensor) -> Tensor:
    """Computes the tanh approximation of GELU."""
    return functional.gelu(x, approximate='tanh')


ACTIVATIONS = {
    'gelu': gelu,
    'gelu_exact': functional.gelu,
    'silu': functional.silu,
    'relu': functional.relu,
    'linear': nn.Identity(),
}


# Basic layers.


class Dense(BaseModule):
    """Computes x W + b, [..., in] -> [..., features]."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.kernel
        return y + self.bias if hasattr(self, 'bias') else y


class GroupDense(BaseModule):
    """Computes x[j] W[j] for each group j of features, [..., groups, in] -> [..., groups, features]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum('...gi,gio->...go', x, self.kernel)


class Embed(BaseModule):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embedding) * self.settings['scale']

    def attend(self, x: Tensor) -> Tensor:
        return x @ self.embedding.T


class RMSNorm(BaseModule):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.settings['epsilon'])
        scale = 1 + self.scale if self.settings['zero_centered'] else self.scale
        return (x32 * inverse * scale).to(x.dtype)


class LayerNorm(BaseModule):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.float() if hasattr(self, 'bias') else None
        normalized = functional.layer_norm(x.float(), x.shape[-1:], self.scale.float(), bias, self.settings['epsilon'])
        return normalized.to(x.dtype)


class GroupedRMSNorm(BaseModule):
    """Applies RMSNorm separately to `num_groups` equal groups of features."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (self.settings['num_groups'], -1))
        inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.settings['epsilon'])
        return ((groups * inverse).flatten(-2) * self.scale).to(x.dtype)


# Positions.


class RelativePositionBias(BaseModule):
    """T5's learned bias for each head and bucket of relative positions, [1, heads, query, key]."""

    def forward(self, tokens: SequenceContext) -> Tensor:
        index = torch.arange(tokens.mask.shape[1], device=tokens.mask.device)
        relative = index[None, :] - index[:, None]
        buckets, largest = self.settings['num_buckets'], self.settings['max_distance']
        if tokens.causal:
            offset, distance = torch.zeros_like(relative), (-relative).clamp(min=0)
        else:
            buckets //= 2
            offset, distance = torch.where(relative > 0, buckets, 0), relative.abs()
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / torch.log(torch.tensor(largest / exact))
        far = (exact + (ratio * (buckets - exact)).int()).clamp(max=buckets - 1)
        return self.embedding[:, offset + torch.where(distance < exact, distance, far)][None]


class AlibiBias(BaseModule):
    """`-slope * |query - key|` with a fixed slope for each head, [1, heads, query, key]."""

    def forward(self, tokens: SequenceContext) -> Tensor:
        heads = self.settings['num_heads']
        power = 2 ** int(math.log2(heads))
        slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
        slopes += [2 ** (-4 * head / power) for head in range(1, 2 * (heads - power), 2)]
        slopes = torch.tensor(slopes, device=tokens.mask.device)
        return -slopes[:, None, None] * tokens.token_distances


class RotaryEmbedding(BaseModule):
    """Applies rotary position embeddings to the first `fraction` of the features of queries or keys."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        half = int(x.shape[-1] * self.settings['fraction']) // 2
        frequencies = 1.0 / self.settings['theta'] ** (torch.arange(half, device=x.device) / half)
        angles = tokens.positions[:, None, None] / self.settings['scaling_factor'] * frequencies
        first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


class SinusoidalPositions(BaseModule):
    """Sinusoidal position embeddings: sines in the first half of the features, cosines in the second half."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        width = x.shape[-1]
        exponents = torch.arange(-(-width // 2), device=x.device) * (2.0 / width)
        angles = tokens.positions[:, None] * torch.pow(torch.tensor(10_000.0, device=x.device), -exponents)
        return torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(x.dtype)


class LearnedPositions(BaseModule):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        self.check_max_length(x.shape[1])
        return self.table[: x.shape[1]].to(x.dtype)


# Attention.


def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Computes attention over [batch, length, heads, head_dim] arrays without scaling the logits."""
    key, value = (array.repeat_interleave(query.shape[2] // array.shape[2], 2) for array in (key, value))
    logits = torch.einsum('bqhd,bkhd->bhqk', query, key).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
    return torch.einsum('bhqk,bkhd->bqhd', logits.softmax(-1).to(value.dtype), value)


class SelfAttention(BaseModule):
    """T5's self-attention. Uses the position bias of this layer if there is one (umT5), otherwise that of the stack."""

    def project_to_heads(self, name: str, x: Tensor) -> Tensor:
        heads = self.settings['num_heads']
        heads = heads if name == 'query' else self.settings.get('num_kv_heads', heads)
        projected = getattr(self, name)(x).unflatten(-1, (heads, -1))
        if not hasattr(self, f'{name}_norm'):
            return projected
        return getattr(self, f'{name}_norm')(projected) * (projected.shape[-1] ** -0.5 if name == 'query' else 1)

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        query, key, value = (self.project_to_heads(name, x) for name in ('query', 'key', 'value'))
        if hasattr(self, 'rotary'):
            query, key = self.rotary(query, tokens), self.rotary(key, tokens)
        bias = self.position_bias(tokens) if hasattr(self, 'position_bias') else tokens.bias
        visible, window = tokens.visibility_mask, self.settings.get('sliding_window')
        if window is not None:
            visible = visible & (tokens.token_distances < window)
        return self.out(attend(query, key, value, visible, bias, self.settings.get('logit_softcap')).flatten(-2))


class CrossAttention(SelfAttention):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        memory, mask = tokens.memory
        key, value = self.project_to_heads('key', memory), self.project_to_heads('value', memory)
        query, softcap = self.project_to_heads('query', x), self.settings.get('logit_softcap')
        return self.out(attend(query, key, value, mask[:, None, None, :], softcap=softcap).flatten(-2))


class ScaledAttention(SelfAttention):
    """Self-attention of BERT and GPT-2: logits are scaled by 1 / sqrt(head_dim), without a position bias."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        query, key, value = (self.project_to_heads(name, x) for name in ('query', 'key', 'value'))
        return self.out(attend(query * query.shape[-1] ** -0.5, key, value, tokens.visibility_mask).flatten(-2))


class TinyAttention(ScaledAttention):
    """aMLP's single-head attention, whose output has the width of the gate."""

    def project_to_heads(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x)[:, :, None]


class LinearAttention(SelfAttention):
    """Computes y_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)) with phi(x) = elu(x) + 1."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        return self.attend_linearly(x, x, tokens.visibility_mask)

    def attend_linearly(self, x: Tensor, source: Tensor, visible: Tensor) -> Tensor:
        query, key = (functional.elu(self.project_to_heads(name, y)) + 1 for name, y in (('query', x), ('key', source)))
        weights = torch.einsum('bqhd,bkhd->bhqk', query, key).float() * visible
        mixed = torch.einsum('bhqk,bkhd->bqhd', weights, self.project_to_heads('value', source).float())
        total = weights.sum(-1).transpose(1, 2)[..., None] + 1e-6
        return self.out((mixed / total).to(x.dtype).flatten(-2))


class LinearCrossAttention(LinearAttention):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        memory, mask = tokens.memory
        return self.attend_linearly(x, memory, mask[:, None, None, :])


# Feed-forward sublayers.


class GatedMLP(BaseModule):
    """Computes (f(x W_0) * x W_1) W_o with the activation f."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        return self.wo(ACTIVATIONS[self.settings['activation']](self.wi_0(x)) * self.wi_1(x))


class ReluMLP(BaseModule):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        return self.wo(self.wi(x).relu())


class GeluMLP(BaseModule):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        return self.wo(functional.gelu(self.wi(x), approximate='tanh' if self.settings['approximate'] else 'none'))


class Identity(BaseModule):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        return x


# Remixer.


class Remixer(BaseModule):
    """Computes X' = gelu(x W_1) * x W_2, S = softmax(H) X' and Y = (C(S, X') + X') W_3.

    The setting `residual` determines where X' is added to the composition C.
    """

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        hidden = gelu(self.wi_0(x)) * self.wi_1(x)
        composed = self.composition(self.mixing(hidden, tokens), hidden)
        match self.settings['residual']:
            case 'hidden_residual':
                return self.wo(composed + hidden)
            case 'identity_residual':
                return self.wo(composed) + hidden
        return self.wo(composed)


class LearnedMixing(BaseModule):
    """Computes softmax(H) X' over the visible tokens. Logits H outside [-20, 20] are compressed into [-30, 30]."""

    def forward(self, hidden: Tensor, tokens: SequenceContext) -> Tensor:
        length = hidden.shape[1]
        self.check_max_length(length)
        logits = self.logits[:length, :length].float()
        beyond = (logits.abs() - 20).clamp(min=0)
        logits = logits.clamp(-20, 20) + logits.sign() * 10 * beyond / (beyond + 10)
        weights = logits.masked_fill(~tokens.visibility_mask[:, 0], -math.inf).softmax(-1).nan_to_num()
        return weights.to(hidden.dtype) @ hidden


def compose_with_alpha(alpha: Tensor | float, mixed: Tensor, unmixed: Tensor) -> Tensor:
    """Computes alpha (S * X') + (1 - alpha) (X' - S)."""
    return alpha * (mixed * unmixed) + (1 - alpha) * (unmixed - mixed)


class FixedAlpha(BaseModule):
    def forward(self, mixed: Tensor, unmixed: Tensor) -> Tensor:
        return compose_with_alpha(self.settings['value'], mixed, unmixed)


class ScalarAlpha(BaseModule):
    def forward(self, mixed: Tensor, unmixed: Tensor) -> Tensor:
        return compose_with_alpha(self.alpha.sigmoid(), mixed, unmixed)


class VectorAlpha(ScalarAlpha):
    """Uses a separate alpha for each hidden unit."""


class DenseGate(BaseModule):
    def forward(self, unmixed: Tensor) -> Tensor:
        return self.gate(unmixed).sigmoid()


class ElementwiseGate(BaseModule):
    def forward(self, unmixed: Tensor) -> Tensor:
        return (unmixed * self.gate).sigmoid()


class GatedAlpha(BaseModule):
    def forward(self, mixed: Tensor, unmixed: Tensor) -> Tensor:
        return compose_with_alpha(self.gating(unmixed), mixed, unmixed)


class GatedComposition(BaseModule):
    def forward(self, mixed: Tensor, unmixed: Tensor) -> Tensor:
        gate = self.gating(unmixed)
        return gate * self.composition(mixed, unmixed) + (1 - gate) * mixed


class NoComposition(BaseModule):
    def forward(self, mixed: Tensor, unmixed: Tensor) -> Tensor:
        return mixed


# MLP-Mixer, HyperMixer, FNet.


class MLPMixer(BaseModule):
    """Computes W_2^T gelu(W_1^T X + b_1) + b_2 along the token axis; padding tokens are set to zero."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        length = x.shape[1]
        self.check_max_length(length)
        hidden = torch.einsum('ls,bld->bsd', self.wi[:length], x * tokens.mask[..., None]) + self.wi_bias[:, None]
        return torch.einsum('sl,bsd->bld', self.wo[:, :length], gelu(hidden)) + self.wo_bias[:length, None]


class WindowMixer(BaseModule):
    """Computes w_2 . gelu(W_1^T x[t-w+1..t] + b_1) + b_2 for each feature; x is zero before the first token."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        padded = functional.pad(x * tokens.mask[..., None], (0, 0, self.settings['window'] - 1, 0))
        windows = padded.unfold(1, self.settings['window'], 1)  # [batch, length, features, window]
        return gelu(windows @ self.wi + self.wi_bias) @ self.wo + self.wo_bias


class GeneratedWeights(BaseModule):
    """Applies an MLP to the features of each head, [batch, length, embed] -> [batch, length, heads, hidden]."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wi(x.unflatten(-1, (self.settings['num_heads'], -1)))
        weights = self.wo(gelu(hidden + self.wi_bias if hasattr(self, 'wi_bias') else hidden))
        return weights + self.wo_bias if hasattr(self, 'wo_bias') else weights


class SharedWeightVector(BaseModule):
    def forward(self, x: Tensor) -> Tensor:
        return self.vector.to(x.dtype).expand(*x.shape[:2], -1, -1)


class HyperMixer(BaseModule):
    """Computes W_2 gelu(W_1^T V) with W_1 and W_2 generated from the tokens; decoders use cumulative sums."""

    def add_token_information(self, name: str, x: Tensor, tokens: SequenceContext) -> Tensor:
        return x + getattr(self, name)(x, tokens) if hasattr(self, name) else x

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        informed = self.add_token_information('token_information', x, tokens)
        w_in = self.w_in(informed)
        w_out = w_in if self.settings['tied'] else self.w_out(informed)
        if not tokens.causal:
            return self.mix_tokens(w_in, x, w_out, tokens.mask)
        value = (x * tokens.mask[..., None]).unflatten(-1, (self.settings['num_heads'], -1))
        hidden = torch.einsum('bnhk,bnhf->bnhkf', w_in, value).float().cumsum(1)
        if self.settings['length_scale']:
            hidden = hidden / (tokens.positions + 1)[:, None, None, None]
        return self.merge_heads(torch.einsum('bnhk,bnhkf->bnhf', w_out, gelu(hidden).to(x.dtype)))

    def mix_tokens(self, w_in: Tensor, source: Tensor, w_out: Tensor, mask: Tensor) -> Tensor:
        value = (source * mask[..., None]).unflatten(-1, (self.settings['num_heads'], -1))
        if self.settings['length_scale']:
            w_in = w_in / mask.sum(1).clamp(min=1)[:, None, None, None]
        hidden = torch.einsum('bnhk,bnhf->bhkf', w_in * mask[..., None, None], value).float()
        return self.merge_heads(torch.einsum('bmhk,bhkf->bmhf', w_out, gelu(hidden).to(source.dtype)))

    def merge_heads(self, mixed: Tensor) -> Tensor:
        return self.norm(mixed.flatten(-2)) if hasattr(self, 'norm') else mixed.flatten(-2)


class HyperMixerCross(HyperMixer):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        memory, mask = tokens.memory
        w_in = self.w_in(self.add_token_information('key_information', memory, SequenceContext(mask)))
        w_out = self.w_out(self.add_token_information('query_information', x, tokens))
        return self.mix_tokens(w_in, memory, w_out, mask)


class FNet(BaseModule):
    """Computes Re(F_tokens(F_features(X))) with padding set to zero; the output depends on the padded length."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        return torch.fft.fft2((x * tokens.mask[..., None]).float()).real.to(x.dtype)


# gMLP and aMLP.


class GMLP(BaseModule):
    """Computes gate(Z, f(Z)) V with Z = gelu(x U) and f(Z) = W LN(Z) + b; aMLP adds a tiny attention to f(Z)."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        split = self.settings['gate'] == 'split_gate'
        units = gelu(self.wi_1(x) if split else self.wi(x))
        mixed = self.mixing(units, tokens)
        if hasattr(self, 'attention'):
            mixed = mixed + self.attention(x, tokens)
        match self.settings['gate']:
            case 'split_gate':
                return self.wo(gelu(self.wi_0(x)) * mixed)
            case 'multiplicative_gate':
                return self.wo(units * mixed)
            case 'additive_gate':
                return self.wo(units + mixed)
        return self.wo(mixed)


class SpatialMixing(BaseModule):
    def forward(self, units: Tensor, tokens: SequenceContext) -> Tensor:
        length = units.shape[1]
        self.check_max_length(length)
        weights = self.weights(length, tokens.causal).to(units.dtype)
        return weights @ (self.norm(units) * tokens.mask[..., None]) + self.bias[:length, None]


class FreeSpatial(BaseModule):
    def forward(self, length: int, causal: bool) -> Tensor:
        weights = self.kernel[:length, :length]
        return weights.tril() if causal else weights


class ToeplitzSpatial(BaseModule):
    """Creates the Toeplitz matrix W[i, j] = w[j - i]; `kernel` stores the weight w[0] at index max_length - 1."""

    def forward(self, length: int, causal: bool) -> Tensor:
        index = torch.arange(length, device=self.kernel.device)
        kernel_index = self.settings['max_length'] - 1 + index[None, :] - index[:, None]
        weights = self.kernel[kernel_index.clamp(max=len(self.kernel) - 1)]
        return weights.tril() if causal else weights


# TIM splits the features into `num_mechanisms` groups with separate parameters.


class TimModule(BaseModule):
    def split_mechanisms(self, x: Tensor) -> Tensor:
        """Splits the features, [batch, length, embed] -> [batch, length, mechanisms, embed / mechanisms]."""
        return x.unflatten(-1, (self.settings['num_mechanisms'], -1))

    def project_to_heads(self, name: str, x: Tensor) -> Tensor:
        """Projects the input to the heads of every mechanism; returns [batch, length, heads, head_dim]."""
        projected = getattr(self, name)(self.split_mechanisms(x))
        return projected.flatten(-2).unflatten(-1, (self.settings['num_heads'], -1))


class TimAttention(TimModule):
    """Attends to the tokens separately in each mechanism; with `competition`, mechanisms compete for the update."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        query, key, value = (self.project_to_heads(name, x) for name in ('query', 'key', 'value'))
        mixed = attend(query, key, value, tokens.visibility_mask, tokens.bias)
        update = self.out(self.split_mechanisms(mixed.flatten(-2)))
        if hasattr(self, 'competition'):
            update = update * self.competition(self.split_mechanisms(x))
        return update.flatten(-2)


class Competition(BaseModule):
    def forward(self, mechanisms: Tensor) -> Tensor:
        return self.score(mechanisms).float().softmax(-2).to(mechanisms.dtype)


class TimCrossAttention(TimModule):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        memory, mask = tokens.memory
        key, value = self.project_to_heads('key', memory), self.project_to_heads('value', memory)
        mixed = attend(self.project_to_heads('query', x), key, value, mask[:, None, None, :])
        return self.out(self.split_mechanisms(mixed.flatten(-2))).flatten(-2)


class InterMechanismAttention(TimModule):
    """Attention between the mechanisms of each token."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        heads = self.settings['num_heads']
        mechanisms = self.split_mechanisms(x)
        query, key, value = (
            getattr(self, name)(mechanisms).unflatten(-1, (heads, -1)) for name in ('query', 'key', 'value')
        )
        weights = torch.einsum('blmhd,blnhd->blhmn', query.float(), key.float()).softmax(-1)
        mixed = torch.einsum('blhmn,blnhd->blmhd', weights, value.float()).to(x.dtype)
        return self.out(mixed.flatten(-2)).flatten(-2)


class TimMLP(TimModule):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        mechanisms = self.split_mechanisms(x)
        return self.wo(gelu(self.wi_0(mechanisms)) * self.wi_1(mechanisms)).flatten(-2)


# Layer layouts and stacks.


class Layer(BaseModule):
    """Base class for layer layouts."""

    def named_sublayers(self) -> list[tuple[str, nn.Module]]:
        return [item for item in self.named_children() if item[0] != 'norm' and not item[0].endswith('_norm')]


class PreNorm(Layer):
    """Normalizes the input of each sublayer; the first sublayer has no norm if the embeddings are normalized."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        for name, sublayer in self.named_sublayers():
            normed = getattr(self, f'{name}_norm')(x) if hasattr(self, f'{name}_norm') else x
            x = x + sublayer(normed, tokens)
        return x


class PostNorm(Layer):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        for name, sublayer in self.named_sublayers():
            x = getattr(self, f'{name}_norm')(x + sublayer(x, tokens))
        return x


class SandwichNorm(Layer):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        for name, sublayer in self.named_sublayers():
            update = sublayer(getattr(self, f'{name}_norm')(x), tokens)
            x = x + getattr(self, f'{name}_post_norm')(update)
        return x


class ReZero(Layer):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        for name, sublayer in self.named_sublayers():
            x = x + getattr(self, f'{name}_scale') * sublayer(x, tokens)
        return x


class Parallel(Layer):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        normed = self.norm(x)
        return x + sum(sublayer(normed, tokens) for _, sublayer in self.named_sublayers())


class Serialized(Layer):
    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        stream = x
        for name, sublayer in self.named_sublayers():
            stream = x + sublayer(getattr(self, f'{name}_norm')(stream), tokens)
        return stream


class LayerList(BaseModule):
    """The layers of a stack, applied in sequence."""

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        for layer in self.children():
            x = layer(x, tokens)
        return x


class Stack(BaseModule):
    """A sequence of layers, with an optional position bias, position embedding and final norm."""

    # `generate` requires this name to match the `main_input_name` of the model.
    main_input_name = 'input_ids'

    def forward(self, x: Tensor, tokens: SequenceContext) -> Tensor:
        if hasattr(self, 'position_bias'):
            tokens = dataclasses.replace(tokens, bias=self.position_bias(tokens))
        if hasattr(self, 'position_embedding'):
            x = x + self.position_embedding(x, tokens)
        x = self.layers(x, tokens)
        return self.final_norm(x) if hasattr(self, 'final_norm') else x


# Input layers and heads of encoder-only models.


class BertInput(BaseModule):
    def forward(self, x: Tensor, tokens: SequenceContext, token_types: Tensor | None = None) -> Tensor:
        has_types = token_types is not None and self.settings['token_types'] > 1
        types = functional.embedding(token_types, self.token_types) if has_types else self.token_types[0]
        return self.norm(x + self.positions(x, tokens) + types)


class NormInput(BaseModule):
    def forward(self, x: Tensor, tokens: SequenceContext, token_types: Tensor | None = None) -> Tensor:
        return self.norm(x)


class BertHead(BaseModule):
    def forward(self, x: Tensor) -> Tensor:
        return self.output_norm(functional.gelu(self.dense(x)))


class ClassifierHead(BaseModule):
    def forward(self, hidden: Tensor, tokens: SequenceContext) -> Tensor:
        if self.settings['pooling'] == 'first_token':
            pooled = hidden[:, 0]
        else:
            weights = tokens.mask[..., None].float()
            pooled = ((hidden.float() * weights).sum(1) / weights.sum(1).clamp(min=1)).to(hidden.dtype)
        return self.output(self.dense(pooled).tanh()).float()


CLASSES = {
    kind.__name__: kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, BaseModule)
}


# Models.


class RemixerT5xConfig(PretrainedConfig):
    """Configuration of a model, with the vocabulary size, the hidden size, and the module tree `module`."""

    model_type = 'remixer_t5x_pytorch'

    def __init__(self, vocab_size: int = 0, hidden_size: int = 0, module: dict | None = None, **kwargs):
        self.vocab_size, self.hidden_size, self.module = vocab_size, hidden_size, module or {'children': {}}
        super().__init__(**kwargs)


class RemixerT5xModel(PreTrainedModel):
    """Base class for the four models. Creates the embedding, stacks and output projection described in config.json."""

    config_class = RemixerT5xConfig

    def __init__(self, config: RemixerT5xConfig):
        super().__init__(config)
        self.settings = config.module
        for name, spec in config.module['children'].items():
            self.add_module(name, build_module(spec))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, because `from_pretrained` loads all weights from the file."""

    def get_input_embeddings(self) -> nn.Module:
        return self.token_embedder

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes the vocabulary logits with the output projection, or with the embedding table if they are tied."""
        if self.settings.get('scaled_output'):
            hidden = hidden * self.config.hidden_size**-0.5
        logits = self.logits(hidden) if hasattr(self, 'logits') else self.get_decoder_embedder().attend(hidden)
        softcap = self.settings.get('logit_softcap')
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def get_decoder_embedder(self) -> nn.Module:
        return getattr(self, 'decoder_token_embedder', self.token_embedder)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, SequenceContext]:
        """Returns the encoder's output [batch, length, embed] and the `SequenceContext` of the inputs.

        Without `attention_mask`, trailing zeros in `input_ids` are padding. Without `token_type_ids`, tokens after the
        first separator have type 1 if the model has a separator.
        """
        if attention_mask is None:
            attention_mask = infer_attention_mask(input_ids)
        tokens = SequenceContext(attention_mask > 0)
        x = self.token_embedder(input_ids)
        if hasattr(self, 'input'):
            if token_type_ids is None and 'separator_id' in self.settings:
                separators = (input_ids == self.settings['separator_id']).long()
                token_type_ids = (separators.cumsum(1) > separators).long() * tokens.mask
            x = self.input(x, tokens, token_type_ids)
        return self.encoder(x, tokens), tokens


def infer_attention_mask(input_ids: Tensor) -> Tensor:
    """Returns a mask [batch, length] of long integers that is 0 at trailing zeros of the rows, which are padding."""
    return ((input_ids != 0).flip(1).cumsum(1).flip(1) > 0).long()


class EncoderWrapper(nn.Module):
    """Wraps the encoder of a model as a separate module, for generation and for export to ONNX."""

    main_input_name = 'input_ids'

    def __init__(self, model: RemixerT5xModel):
        super().__init__()
        # The tuple prevents PyTorch from registering the model as a child.
        self.model = (model,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.model[0].encode(input_ids, attention_mask)[0])


class RemixerT5xForConditionalGeneration(RemixerT5xModel, GenerationMixin):
    """An encoder-decoder model."""

    def get_encoder(self, *_, **__) -> nn.Module:
        return EncoderWrapper(self).train(self.training)

    def generate(self, inputs: Tensor | None = None, *args, **kwargs) -> Any:
        """Generates answers; see transformers. Without `attention_mask`, trailing zeros in the inputs are padding."""
        inputs = kwargs.pop('input_ids', inputs)
        if inputs is not None and kwargs.get('attention_mask') is None:
            kwargs['attention_mask'] = infer_attention_mask(inputs)
        return super().generate(inputs, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        **_,
    ) -> Seq2SeqLMOutput:
        """Computes the logits of the next token, [batch, target_length, vocab]."""
        if encoder_outputs is None:
            memory, tokens = self.encode(input_ids, attention_mask)
            mask = tokens.mask
        else:
            memory = encoder_outputs[0]
            mask = torch.ones(memory.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask > 0
        everywhere = torch.ones_like(decoder_input_ids, dtype=torch.bool)
        tokens = SequenceContext(everywhere, causal=True, memory=(memory, mask.to(memory.device)))
        begin_id = self.settings.get('begin_id', 0)
        decoder_input_ids = torch.where(decoder_input_ids == 0, begin_id, decoder_input_ids)
        logits = self.compute_logits(self.decoder(self.get_decoder_embedder()(decoder_input_ids), tokens))
        return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=memory)

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask=None, encoder_outputs=None, **_) -> dict:
        return {'decoder_input_ids': input_ids, 'attention_mask': attention_mask, 'encoder_outputs': encoder_outputs}


class RemixerT5xForCausalLM(RemixerT5xModel, GenerationMixin):
    """A decoder-only model, which inserts the begin token automatically. Padding may be on either side of the text."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> CausalLMOutput:
        """Computes the logits of the next token at each position, [batch, length, vocab]."""
        # Moves leading padding to the end of each row, because positions are counted from the first token.
        is_token = torch.ones_like(input_ids) if attention_mask is None else (attention_mask > 0).long()
        shift = is_token.argmax(1, keepdim=True)
        begin = self.settings.get('begin_id', 0)
        ids = functional.pad(roll_rows_left(input_ids, shift), (1, 0), value=begin)
        tokens = SequenceContext(torch.ones_like(ids, dtype=torch.bool), causal=True)
        logits = self.compute_logits(self.decoder(self.token_embedder(ids), tokens))
        if begin:
            logits[..., 0] = PADDING_LOGIT
        return CausalLMOutput(logits=roll_rows_left(logits[:, 1:], -shift))

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask=None, **_) -> dict:
        return {'input_ids': input_ids, 'attention_mask': attention_mask}


def roll_rows_left(rows: Tensor, shifts: Tensor) -> Tensor:
    """Rolls each row of a [batch, length, ...] array to the left by its entry in `shifts` [batch, 1]."""
    index = (torch.arange(rows.shape[1], device=rows.device) + shifts) % rows.shape[1]
    return torch.take_along_dim(rows, index.reshape(*index.shape, *(1,) * (rows.ndim - 2)), 1)


class RemixerT5xForMaskedLM(RemixerT5xModel):
    """An encoder that predicts masked tokens."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_,
    ) -> MaskedLMOutput:
        """Computes the logits of the token at each position, [batch, length, vocab]."""
        hidden = self.encode(input_ids, attention_mask, token_type_ids)[0]
        if hasattr(self, 'head'):
            logits = self.token_embedder.attend(self.head(hidden)) + self.head.bias
        else:
            logits = self.token_embedder.attend(hidden * self.config.hidden_size**-0.5)
        return MaskedLMOutput(logits=logits, hidden_states=(hidden,))


class RemixerT5xForSequenceClassification(RemixerT5xModel):
    """An encoder with a classification or regression head."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_,
    ) -> SequenceClassifierOutput:
        """Computes the logits of the labels, [batch, labels] float32."""
        logits = self.head(*self.encode(input_ids, attention_mask, token_type_ids))
        return SequenceClassifierOutput(logits=logits)
