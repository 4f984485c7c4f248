"""What is known of SageMaker's instance types: their GPUs, their disks, and which one stands for an accelerator's name.

GPUs: https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html; disks: …/co.html, …/mo.html (read 2026-11-30).
"""

from __future__ import annotations

DEFAULT = "ml.m5.xlarge"
"""Without a GPU: the cheapest type that holds torch and a small model's exchange (16 GiB) and does not burst."""

FOR_GPU = {
    "T4": "ml.g4dn.xlarge",
    "A10G": "ml.g5.2xlarge",
    "L4": "ml.g6.2xlarge",
    "L40S": "ml.g6e.2xlarge",
    "V100": "ml.p3.2xlarge",
    "H100": "ml.p5.4xlarge",
}
"""Types with one GPU each, by the GPU's common name."""

LOCAL_DISK = frozenset(
    {
        *("g4dn", "g5", "g6", "g6e", "g7", "g7e", "r5d", "trn1", "trn1n", "trn2"),
        *("p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "p6e-gb200"),
    }
)
"""Families whose only disk is the instance's own NVMe: no volume is attached, and it takes no KMS key of ours."""

_FOUR = dict.fromkeys(("12xlarge", "24xlarge"), 4)
_GPUS: dict[str, dict[str, int]] = {
    "g4dn": {"12xlarge": 4},
    "g5": {**_FOUR, "48xlarge": 8},
    "g6": {**_FOUR, "48xlarge": 8},
    "g6e": {**_FOUR, "48xlarge": 8},
    "g7e": {"12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
    "p2": {"8xlarge": 8, "16xlarge": 16},
    "p3": {"8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "p6e-gb200": {"36xlarge": 4},
}


def family(instance_type: str) -> str:
    """`g5` of `ml.g5.2xlarge`; an empty string for what is no instance type."""
    return instance_type.partition(".")[2].partition(".")[0]


def gpus(instance_type: str) -> int | None:
    """How many GPUs a type has; None if that is not known."""
    name = family(instance_type)
    if name in _GPUS:
        return _GPUS[name].get(instance_type.rpartition(".")[2], 1)
    return None if name.startswith(("g", "p")) else 0


def has_local_disk(instance_type: str) -> bool:
    """Whether its disk is the instance's own."""
    return family(instance_type) in LOCAL_DISK


def is_trainium(instance_type: str) -> bool:
    """Whether its accelerator is Trainium, which the trainer and the image know nothing of."""
    return family(instance_type).startswith("trn")
