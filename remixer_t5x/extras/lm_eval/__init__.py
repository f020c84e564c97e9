"""Registers the model `remixer_t5x` with lm-evaluation-harness, which does not discover third-party models.

    python -m remixer_t5x.extras.lm_eval --model remixer_t5x --model_args path=runs/mine --tasks ...

This command runs `lm_eval` with the registered model, and accepts the same arguments as `lm_eval`.
"""

from remixer_t5x.errors import import_optional

NAME = 'remixer_t5x'


def register() -> None:
    """Registers the model. Raises UserError if lm_eval is not installed."""
    registry = import_optional('lm_eval.api.registry', 'evaluating on lm_eval tasks', 'lm-eval').model_registry
    # lm_eval registers its built-in models only if its registry is empty, so they are registered here first.
    import lm_eval.models  # noqa: F401

    if NAME not in registry:
        registry.register(NAME, target='remixer_t5x.extras.lm_eval.harness_model:RemixerLM')
