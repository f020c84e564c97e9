"""Importing this module makes the model `remixer_t5x` known to lm-evaluation-harness, which finds no models by itself.

    python -m remixer_t5x.extras.lm_eval --model remixer_t5x --model_args path=runs/mine --tasks ...

is `lm_eval` with this model; all arguments are lm_eval's.
"""

import sys

from remixer_t5x.errors import UserError, reason

NAME = 'remixer_t5x'


def register() -> None:
    """Registers the model. Raises UserError where lm_eval is not installed."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UserError(
            f"lm_eval cannot be imported ({reason(error)}); type pip install 'remixer-t5x[lm-eval]'"
        ) from error
    # Registers its own models, which it would otherwise leave out because the registry is not empty.
    import lm_eval.models  # noqa: F401

    if NAME not in model_registry:
        model_registry.register(NAME, target='remixer_t5x.extras.lm_eval.harness_model:RemixerLM')


def main() -> int:
    """Runs lm_eval's own command."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())

register()
