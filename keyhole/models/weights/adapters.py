"""LoRA adapters: merged into the weights of the model that they were trained for, by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keyhole.errors import ModelError


def merged(network: Any, adapter: Path, base: str) -> Any:
    """The network with a LoRA adapter in its weights; ModelError for one that does not fit."""
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
        if config.peft_type != peft.PeftType.LORA:
            raise ModelError(
                f"the adapter {str(adapter)!r} is of the kind {config.peft_type.value}, which "
                "cannot be merged into weights; LORA can"
            )
        adapted = peft.get_peft_model(network, config)
        weights = peft.load_peft_weights(str(adapter), device="cpu")
        report: Any = peft.set_peft_model_state_dict(adapted, weights)
    except ModelError:
        raise
    except Exception as error:  # peft, safetensors, the file system
        told = (str(error).strip().splitlines() or ["no message"])[0]
        raise ModelError(
            f"the adapter {str(adapter)!r} does not fit the model {base!r}: "
            f"{type(error).__name__}: {told}; name its own base as base_model_name_or_path in its "
            "adapter_config.json"
        ) from error
    absent = [name for name in report.missing_keys if ".lora_" in name]
    wrong = sorted(absent) or sorted(report.unexpected_keys)
    if wrong:
        raise ModelError(
            f"the adapter {str(adapter)!r} does not fit the model {base!r}, or is damaged: "
            f"{'it lacks' if absent else 'the model has no'} {wrong[0]}, and {len(wrong) - 1} more"
        )
    return adapted.merge_and_unload()
