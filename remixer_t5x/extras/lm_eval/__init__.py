"""Models for lm-evaluation-harness, which finds none by itself: `register()` adds the model `remixer_t5x`.

    python -m remixer_t5x.extras.lm_eval --model remixer_t5x --model_args path=runs/mine --tasks ...

is `lm_eval` with this model; all arguments are lm_eval's.
"""

from remixer_t5x.errors import UserError, reason

NAME = 'remixer_t5x'


def register() -> None:
    """Registers the model. Raises UserError if lm_eval is not installed."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UserError(
            f"lm_eval cannot be imported ({reason(error)}); type pip install 'remixer-t5x[lm-eval]'"
        ) from error
    # Registers lm_eval's own models, which it would otherwise skip because the registry is not empty.
    import lm_eval.models  # noqa: F401

    if NAME not in model_registry:
        model_registry.register(NAME, target='remixer_t5x.extras.lm_eval.harness_model:RemixerLM')
