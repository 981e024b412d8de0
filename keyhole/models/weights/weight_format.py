"""The formats that weights are packed in when a model is loaded, by name. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from keyhole.config import setting, short_repr
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.registry import parse_one, typed

#: Bits of a weight of the layers, by name.
BITS = {"int4": 4, "int8": 8}
#: The blocks of a GGUF file as plain numbers.
DEQUANTISED = "dequantised"
#: Sizes that the products are made for.
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How weights are packed: bits of a weight, and how many share a scale and a minimum."""

    bits: int
    group_size: int = setting(64, "weights that share a scale and a minimum")

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            right = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size {self.group_size!r} of weights must be one of {right}")

    __repr__ = short_repr

    @property
    def name(self) -> str:
        """The format as users write it."""
        found = next(name for name, bits in BITS.items() if bits == self.bits)
        default = type(self).group_size
        return found if self.group_size == default else f"{found}:group_size={self.group_size}"


def weight_format(given: str | None) -> WeightFormat | None:
    """The format of "int4", "int8" or "int4:group_size=32"; None if nothing is packed.

    Nothing is under None (the weights as stored) and "dequantised".

    UnknownNameError for another name or setting, ConfigError for a group size that is not made.
    """
    if given in (None, DEQUANTISED):
        return None
    spec = parse_one(str(given), "format of weights")
    if spec.name not in BITS:
        raise UnknownNameError("format of weights", spec.name, [*BITS, DEQUANTISED])
    fields = [field for field in dataclasses.fields(WeightFormat) if field.name != "bits"]
    return WeightFormat(bits=BITS[spec.name], **typed(spec, "weights", fields))
