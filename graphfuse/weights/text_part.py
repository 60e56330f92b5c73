"""The language model within a checkpoint of several modalities.

    model.language_model.layers.0...   lm_head.weight                   model.visual...
    language_model.model.layers.0...   language_model.lm_head.weight    vision_tower...

Both forms, and any other in which the embedding and the layers stand side by side, are found by structure.
"""

from __future__ import annotations

from graphfuse.weights.files import StoredTensor

_EMBEDDING, _FIRST_LAYER, _HEAD = "embed_tokens.weight", "layers.0.", "lm_head."


def text_part(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The language model's tensors under the names they have in a checkpoint of its own (`model.layers.0...`); the
    others are left out. All of them as they are if there is no language model to be seen."""
    prefixes = [name.removesuffix(_EMBEDDING) for name in stored if name.endswith(_EMBEDDING)]
    with_layers = {p for p in prefixes if any(name.startswith(p + _FIRST_LAYER) for name in stored)}
    if not with_layers:
        return stored
    body = min(with_layers, key=len)
    heads = [name[: name.index(_HEAD)] for name in stored if name.startswith(_HEAD) or f".{_HEAD}" in name]
    renamed = {f"model.{name.removeprefix(body)}": tensor for name, tensor in stored.items() if name.startswith(body)}
    if heads:
        head = min(heads, key=len)
        renamed |= {name.removeprefix(head): t for name, t in stored.items() if name.startswith(head + _HEAD)}
    return renamed
