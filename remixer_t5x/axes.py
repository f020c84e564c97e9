"""Logical axis names of parameters and activations.

Sharding rules (`devices/partition.py`) map each name to mesh axes (`data`, `fsdp`, `tensor`) or to None (replicated).
If you add a name, add its rule there. Add an axis that stacks matrices to `is_hidden_matrix` and to
`optim.optimizer.build_weight_decay_mask` too.
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
POSITIONS_OUT = 'positions_out'  # output positions of a learned token-mixing matrix
POSITIONS_IN = 'positions_in'  # input positions of a learned token-mixing matrix
TOKEN_MLP = 'token_mlp'  # hidden units of an MLP along tokens, or of a generated MLP
MECHANISMS = 'mechanisms'  # groups of features that interact only through attention, or not at all
LORA_RANK = 'lora_rank'  # rank of an adapter; its second matrix [lora_rank, features] starts at zero
OUTPUTS = 'outputs'  # outputs of a head: labels of a classifier, or one score per mechanism
LAYERS = 'layers'  # identical layers stacked by scan; never sharded


def is_hidden_matrix(names: tuple[str | None, ...]) -> bool:
    """Returns whether a parameter with these axes is a weight matrix, or a stack of matrices, of a hidden layer.

    Returns False for embeddings, output projections, adapters, tables such as (None, MLP) with several values for each
    hidden unit, and parameters with an axis of positions or distances.
    """
    features = {EMBED, MLP, JOINED_KV, KV, TOKEN_MLP}
    if len(names) < 2:
        return False
    *stacked, inputs, outputs = names
    return inputs in features and outputs in {*features, None} and {*stacked} <= {LAYERS, HEADS, MECHANISMS}
