"""A model of ours as a GPT-2. Most decoders that our gin files describe have none."""

from remixer_t5x.interop.huggingface import one_stack
from remixer_t5x.interop.huggingface.gpt2 import Gpt2
from remixer_t5x.models.architecture.decoder_only import DecoderOnly
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.layers.norms import LayerNorm
from remixer_t5x.models.layers.positions import LearnedPositions
from remixer_t5x.models.sublayers.gelu_mlp import GeluMLP
from remixer_t5x.models.sublayers.scaled_attention import ScaledAttention

KIND = 'GPT-2'


def describe(module: DecoderOnly, end_id: int) -> tuple[Gpt2, tuple[int, ...]]:
    """The GPT-2 that `module` is, and the lengths of its runs of layers; `end_id` is Hugging
    Face's id of the end token.

    Calls factories for their attributes and does not trace anything. Raises UserError with the first part that Hugging
    Face's GPT-2 does not have.
    """
    stack = module.decoder_stack()
    found = one_stack.layer_sizes(stack, PreNorm, (ScaledAttention, GeluMLP), LayerNorm, KIND)
    shares = found['num_heads'] * found.pop('head_dim') == module.embed_dim
    for holds, difference in (
        (shares, 'its heads do not share the width'),
        (found.pop('approximate'), 'GELU is exact'),
        (module.tied, 'the output has a matrix of its own'),
        (not module.scaled_output, 'the output is scaled'),
        (module.begin_id == end_id + 1, f'decoder_only.DecoderOnly.begin_id is {module.begin_id}, not {end_id + 1}'),
    ):
        one_stack.require(holds, KIND, difference)
    positions = one_stack.part(stack.position_embedding, LearnedPositions, KIND, 'DECODER_POSITION_EMBEDDING')
    last = one_stack.part(stack.final_norm, LayerNorm, KIND, 'FINAL_NORM')
    one_stack.require(last.epsilon == found['epsilon'], KIND, 'its norms have different epsilons')
    runs = tuple(count for _, count in stack.runs)
    gpt2 = Gpt2(
        vocab_size=module.vocab_size - 1,
        embed_dim=module.embed_dim,
        num_layers=sum(runs),
        max_length=positions.max_length,
        end_id=end_id,
        **found,
    )
    return gpt2, runs
