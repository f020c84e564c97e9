"""Glossary of the logical axis names that parameters and activations carry.

A rule table in gin maps each name to mesh axes (`data`, `fsdp`, `tensor`); a name without a rule is replicated.
"""

# Activations.
BATCH = 'batch'  # rows of a batch
LENGTH = 'length'  # tokens of a row
ACTIVATION_EMBED = 'activation_embed'  # features of the residual stream, D

# Parameters.
EMBED = 'embed'  # features of the residual stream, D
MLP = 'mlp'  # hidden units of a feed-forward sublayer, F
JOINED_KV = 'joined_kv'  # heads x head width, joined into one axis
HEADS = 'heads'  # attention heads
KV = 'kv'  # features of one head
VOCAB = 'vocab'  # vocabulary entries
RELPOS_BUCKETS = 'relpos_buckets'  # buckets of relative distance
POSITIONS_OUT = 'positions_out'  # rows of a learned token-mixing matrix: the positions written to
POSITIONS_IN = 'positions_in'  # columns of a learned token-mixing matrix: the positions read from
TOKEN_MLP = 'token_mlp'  # hidden units of an MLP along tokens, or of a generated one
MECHANISMS = 'mechanisms'  # groups of features that do not mix, or mix by attention alone
LORA_RANK = 'lora_rank'  # between the two matrices of an adapter; the second, whose rows it counts, starts at zero
OUTPUTS = 'outputs'  # what a head or a score computes: a classifier's labels, one number for a mechanism
LAYERS = 'layers'  # equal layers of a run, stacked by scan; never sharded


def is_hidden_matrix(names: tuple[str | None, ...]) -> bool:
    """Whether the last two axes of a parameter map features or hidden units to others, and all axes before them stack
    such matrices.

    Embeddings, output projections, adapters, vectors, and everything along positions or distances are not.
    """
    # None is the axis of a small matrix that nothing splits; (None, EMBED) are embeddings of token types.
    features = {EMBED, MLP, JOINED_KV, TOKEN_MLP, None}
    stacked, ends = {*names[:-2]}, names[-2:]
    if len(ends) < 2 or ends == (None, EMBED):
        return False
    return {*ends} <= features and stacked <= {LAYERS, HEADS, MECHANISMS}
