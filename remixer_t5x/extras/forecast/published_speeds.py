"""Training speeds that T5X's users have published, to compare with. Numbers only, each with its source.

They are of T5X on GPUs, by NVIDIA. T5X's own repository and paper print no training speed; we know of none for TPUs.
"""

import dataclasses

LENGTHS = {'inputs': 512, 'targets': 128}
_SOURCE = 'github.com/NVIDIA/JAX-Toolbox, rosetta/rosetta/projects/t5x/README.md'


@dataclasses.dataclass(frozen=True)
class PublishedSpeed:
    """A printed speed of pretraining T5.1.1 on the Pile, 512 input and 128 target tokens (its `*_pile_pretrain.gin`).

    Attributes:
        chip: as in a topology.
        size: gin file in sizes/.
        numbers: in which products are computed.
        devices: how many.
        rows: sequences of a batch for each device.
        sequences: per second and device.
        source: where it is printed.
    """

    chip: str
    size: str
    numbers: str
    devices: int
    rows: int
    sequences: float
    source: str = _SOURCE


SPEEDS = (
    PublishedSpeed('a100', 'small', 'bf16', 8, 256, 714),
    PublishedSpeed('a100', 'large', 'bf16', 64, 32, 75.8),
    PublishedSpeed('a100', 'xl', 'bf16', 144, 8, 21.0),
    PublishedSpeed('a100', 'xl', 'bf16', 256, 8, 16.9),
    PublishedSpeed('h100', 'large', 'fp8', 64, 32, 158.7),
    PublishedSpeed('h100', 'xl', 'fp8', 144, 14, 50.4),
    PublishedSpeed('h100', 'xl', 'fp8', 256, 8, 37.8),
)


def of_chip(chip: str) -> list[PublishedSpeed]:
    return [speed for speed in SPEEDS if speed.chip == chip]
