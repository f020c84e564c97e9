"""Finds unused parameters of a model."""

import jax
from jax import export


def unread_params(model, params, batch) -> list[str]:
    """Returns the paths of parameters that the loss does not depend on. `params` and `batch` may be abstract."""
    loss = jax.jit(lambda params, batch: model.loss(params, batch)[0])
    read = export.export(loss)(params, batch).module_kept_var_idx
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path) for number, (path, _) in enumerate(paths) if number not in read]
