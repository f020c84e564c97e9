"""Models for lm-evaluation-harness.

    python -m remixer_t5x.extras.lm_eval --model remixer_t5x --model_args path=runs/mine --tasks ...

runs `lm_eval` with the model `remixer_t5x`; all arguments are lm_eval's. In Python, call `register()` before
`lm_eval.simple_evaluate`, because lm_eval does not discover models of other packages.
"""

from remixer_t5x.errors import UserError

NAME = 'remixer_t5x'


def register() -> None:
    """Registers the model. Raises UserError if lm_eval is not installed."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError:
        raise UserError("lm_eval is not installed; type pip install 'remixer-t5x[lm_eval]'") from None
    # Registers lm_eval's own models, which it would otherwise leave out because the registry is not empty.
    import lm_eval.models  # noqa: F401

    if NAME not in model_registry:
        model_registry.register(NAME, target='remixer_t5x.extras.lm_eval.harness_model:RemixerLM')
