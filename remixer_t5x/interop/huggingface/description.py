"""Describes a model of ours in Hugging Face's terms. Most models that gin files can describe have no equivalent."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from remixer_t5x.errors import UserError


class Refusal(UserError):
    """Hugging Face does not have this model of ours, for a `reason`."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f'{reason}; --to_safetensors=FILE writes the parameters of any model')


class Description:
    """Collects the sizes of a model of ours; Hugging Face has one value of each for the whole model."""

    def __init__(self, kind: str):
        self._kind = kind
        self.sizes: dict[str, Any] = {}

    def require(self, holds: bool, difference: str) -> None:
        """Raises Refusal, because of the `difference`, unless `holds`."""
        if not holds:
            raise Refusal(f"Hugging Face's {self._kind} does not have this model: {difference}")

    def size(self, name: str, value: Any, where: str) -> None:
        """Sets a size. Raises Refusal if it was another one before."""
        before = self.sizes.setdefault(name, value)
        shown, shown_before = (getattr(number, '__name__', repr(number)) for number in (value, before))
        self.require(before == value, f'{name} is {shown} in {where} and {shown_before} before it')

    def part(self, factory: Callable[..., Any] | None, allowed: type, where: str) -> Any:
        """Calls `factory`. Raises Refusal if it does not make an `allowed`."""
        part = factory() if factory is not None else None
        self.require(isinstance(part, allowed), f'{where} is {None if part is None else type(part).__name__}')
        return part

    def norm(self, factory: Callable[..., Any] | None, allowed: type, where: str) -> None:
        """Sets `epsilon`."""
        self.size('epsilon', self.part(factory, allowed, where).epsilon, where)

    def stack(self, side: str, stack: Any, layout: type, norm: type, allowed: Sequence[Any]) -> Iterator[Any]:
        """Sets the sizes of the layers of a stack, and yields their sublayers.

        Args:
            side: 'encoder' or 'decoder', in errors.
            stack: a `Stack`.
            layout: class of every layer.
            norm: class of every norm.
            allowed: class, or tuple of classes, of each sublayer of a layer.
        """
        for factory, _ in stack.runs:
            layer = factory()
            sublayers = [sublayer() for sublayer in layer.sublayers]
            known = tuple(_flatten(allowed))
            for sublayer in sublayers:
                name = type(sublayer).__name__
                self.require(isinstance(sublayer, known), f'a layer of the {side} has the sublayer {name}')
            fits = len(sublayers) == len(allowed) and all(map(isinstance, sublayers, allowed))
            self.require(fits, f'a layer of the {side} is {[type(sublayer).__name__ for sublayer in sublayers]}')
            self.require(isinstance(layer, layout), f'the layout of the {side} is {type(layer).__name__}')
            self.norm(layer.norm, norm, f'the norm of the {side}')
            for sublayer in sublayers:
                for name in ('num_heads', 'head_dim', 'hidden_dim', 'approximate'):
                    if hasattr(sublayer, name):
                        self.size(name, getattr(sublayer, name), f'{type(sublayer).__name__} of the {side}')
                yield sublayer


def _flatten(classes: Iterable[Any]) -> Iterator[type]:
    for kind in classes:
        yield from kind if isinstance(kind, tuple) else (kind,)


def run_lengths(**stacks: Any) -> dict[str, tuple[int, ...]]:
    """The lengths of the runs of layers of each stack."""
    return {side: tuple(count for _, count in stack.runs) for side, stack in stacks.items()}
